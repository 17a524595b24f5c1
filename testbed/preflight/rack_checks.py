"""Checks for hardware only. Not yet run on hardware; their parsers are tested with output in the documented formats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.testbed.preflight import abilities, affinity_check, fec, golden, switch_ports, switch_qos
from faultbed.testbed.preflight.checks import Check, State
from faultbed.testbed.preflight.rack_formats import (
    Gpu,
    chrony_offset_s,
    chrony_uses_own_clock,
    complaint,
    gpu_wrong,
    gpus,
    key_values,
    link_unreported,
    link_wrong,
    pcie_unreported,
    pcie_wrong,
    qos,
    qos_unreported,
    qos_wrong,
)

__all__ = ["RACK_CHECKS"]


def _wrong_values(
    tool: str, wrong: Callable[[Mapping[str, str]], Iterable[tuple[str, str]]]
) -> Callable[[Inventory, State], Iterator[tuple[str, str, str]]]:
    """Return the function of a check that reads a tool's output for each RNIC and reports what is wrong in it."""

    def check(inventory: Inventory, state: State) -> Iterator[tuple[str, str, str]]:
        for where, raw in _of_rnics(inventory, state, tool):
            for observed, expected in wrong(key_values(raw)):
                yield where, observed, expected

    return check


def _pcie_undetermined(inventory: Inventory, state: State) -> Iterator[tuple[str, str]]:
    for where, raw in _of_rnics(inventory, state, "pcie"):
        if lacking := pcie_unreported(key_values(raw)):
            yield where, f"sysfs does not report {', '.join(lacking)}"


def _link_undetermined(inventory: Inventory, state: State) -> Iterator[tuple[str, str]]:
    """Report hosts without the tool, or without its values."""
    for where, raw in _of_rnics(inventory, state, "mlxlink"):
        values = key_values(raw)
        if "State" not in values:
            yield where, complaint("mlxlink", raw)
        elif lacking := link_unreported(values):
            yield where, f"mlxlink does not report {', '.join(lacking)}"


def _speeds(inventory: Inventory, state: State) -> Iterator[tuple[str, int | None, float | None]]:
    """Yield where, the speed of each RNIC's port by the kernel and by the inventory (Gb/s; None: unknown)."""
    for where, raw in _of_rnics(inventory, state, "fec-last"):
        host, _, rnic = where.partition(":")
        mbps = fec.read(raw).speed_mbps
        yield where, mbps // 1000 if mbps else None, inventory.topology.rnic_link(host, rnic).b.speed_gbps


def _speed(inventory: Inventory, state: State) -> Iterator[tuple[str, str, str]]:
    for where, have, expected in _speeds(inventory, state):
        if have is not None and expected is not None and have != expected:
            yield where, f"{have} Gb/s", f"{expected:g} Gb/s, by the inventory"


def _speed_undetermined(inventory: Inventory, state: State) -> Iterator[tuple[str, str]]:
    for where, have, expected in _speeds(inventory, state):
        if expected is None:
            yield where, "the inventory does not give its speed (speed_gbps)"
        elif have is None:
            yield where, "the kernel does not report its speed, as of a port that is down"


def _firmware(inventory: Inventory, state: State) -> Iterator[tuple[str, str, str]]:
    """Compare the firmware of RNICs of one board with that of most of them; without a majority, report the lab."""
    versions: dict[str, dict[str, str]] = {}
    for where, raw in _of_rnics(inventory, state, "firmware"):
        board, _, version = raw.strip().partition("\n")
        if version.strip():
            versions.setdefault(board.strip(), {})[where] = version.strip()
    for board, by_rnic in versions.items():
        ((usual, count),) = Counter(by_rnic.values()).most_common(1)
        if count * 2 <= len(by_rnic):
            observed = f"RNICs of {board} have firmware {', '.join(sorted(set(by_rnic.values())))}, without a majority"
            yield inventory.name, observed, "one version (faultbed_golden can fix it)"
            continue
        for where, version in by_rnic.items():
            if version != usual:
                yield where, f"firmware {version}", f"{usual}, as on most others of {board}"


def _firmware_undetermined(inventory: Inventory, state: State) -> Iterator[tuple[str, str]]:
    for where, raw in _of_rnics(inventory, state, "firmware"):
        if not raw.strip().partition("\n")[2].strip():
            yield where, "board and firmware cannot be read in /sys/class/infiniband"


def _gpus(inventory: Inventory, state: State) -> Iterator[tuple[str, str, str]]:
    answered: dict[str, Gpu] = {}
    for host in inventory.topology.hosts:
        if not host.gpus:
            continue
        answer = gpus(state[host.name].raw.get("gpu", ""))
        if len(answer.gpus) != len(host.gpus):
            why = f" ({answer.why})" if answer.why else ""
            yield host.name, f"{len(answer.gpus)} GPUs answer{why}", str(len(host.gpus))
        for gpu in answer.gpus:
            where = f"{host.name}:{gpu.place}"
            answered[where] = gpu
            for observed, expected in gpu_wrong(gpu):
                yield where, observed, expected
    yield from _odd_ones(answered)


def _odd_ones(answered: Mapping[str, Gpu]) -> Iterator[tuple[str, str, str]]:
    """Report GPUs whose clocks or power limit differ from most others, which is likely a leftover setting."""
    tops = Counter(gpu.sm_max_mhz for gpu in answered.values() if gpu.sm_max_mhz is not None)
    limits = Counter(gpu.power_limit_w for gpu in answered.values() if gpu.power_limit_w is not None)
    clocks_set = sum(gpu.clocks_set for gpu in answered.values())
    for where, gpu in answered.items():
        if gpu.sm_max_mhz is not None and tops[gpu.sm_max_mhz] * 2 < tops.total():
            usual = tops.most_common(1)[0][0]
            yield where, f"SM clock up to {gpu.sm_max_mhz} MHz", f"{usual} MHz, as on most others"
        if gpu.clocks_set and clocks_set * 2 < len(answered):
            yield (
                where,
                "its clocks are set or locked",
                "not set, as on most others: `nvidia-smi -rgc`, `nvidia-smi -rac`",
            )
        if gpu.power_limit_w is not None and limits[gpu.power_limit_w] * 2 < limits.total():
            usual = limits.most_common(1)[0][0]
            yield where, f"power limit {gpu.power_limit_w} W", f"{usual} W, as on most others: `nvidia-smi -pl`"


def _gpus_undetermined(inventory: Inventory, state: State) -> Iterator[tuple[str, str]]:
    for host in inventory.topology.hosts:
        for gpu in gpus(state[host.name].raw.get("gpu", "")).gpus:
            lacking = [
                reading
                for reading, value in (
                    ("ECC mode", gpu.ecc),
                    ("persistence mode", gpu.persistence),
                    ("reasons for lowered clocks", gpu.reasons),
                    ("clocks", gpu.sm_max_mhz),
                    ("power limit", gpu.power_limit_w),
                    ("PCIe width", gpu.pcie[1]),
                )
                if value is None
            ]
            if lacking and gpu.why is None:
                yield f"{host.name}:{gpu.place}", f"NVML does not report {', '.join(lacking)}"


def _time(inventory: Inventory, state: State) -> Iterator[tuple[str, str, str]]:
    bound_s = traits_of(inventory.kind).clock_bound_s
    by_themselves = _by_themselves(inventory, state)
    for host in inventory.topology.hosts:
        raw = state[host.name].raw.get("chrony", "")
        offset_s = chrony_offset_s(raw)
        if host.name in by_themselves:
            if len(by_themselves) > 1:
                yield host.name, f"its own clock is its source, as on {len(by_themselves) - 1} others", "one source"
            continue
        if _has_no_chrony(raw):
            continue
        if offset_s is None:
            yield host.name, f"not synchronised ({complaint('chronyc', raw)})", f"within {bound_s:g} s"
        elif offset_s > bound_s:
            yield host.name, f"{offset_s:g} s from its source", f"within {bound_s:g} s"


def _time_undetermined(inventory: Inventory, state: State) -> Iterator[tuple[str, str]]:
    for host in inventory.topology.hosts:
        raw = state[host.name].raw.get("chrony", "")
        if _has_no_chrony(raw):
            yield (
                host.name,
                f"{complaint('chronyc', raw)}; a host that uses only PTP has no chrony; check phc2sys there",
            )
    if len(by_themselves := _by_themselves(inventory, state)) == 1:
        yield by_themselves[0], "its own clock is its source; whether it is that of the other hosts is not reported"


def _by_themselves(inventory: Inventory, state: State) -> list[str]:
    """Return the hosts whose clock follows no source. One of them may be the source of the others."""
    hosts = inventory.topology.hosts
    return [host.name for host in hosts if chrony_uses_own_clock(state[host.name].raw.get("chrony", ""))]


def _has_no_chrony(raw: str) -> bool:
    """Return whether chronyc is not installed. Without its daemon, chronyc prints a message, which counts as wrong."""
    return not raw.strip() or raw.rstrip().endswith("not found")


def _qos(inventory: Inventory, state: State) -> Iterator[tuple[str, str, str]]:
    profile = inventory.qos
    if profile is None:
        return
    for where, raw in _of_rnics(inventory, state, "qos"):
        have = qos(raw)
        for observed, expected in qos_wrong(
            have, trust=profile.trust, pfc=profile.pfc_priorities, priority=inventory.priority_of_dscp
        ):
            yield where, observed, expected


def _qos_undetermined(inventory: Inventory, state: State) -> Iterator[tuple[str, str]]:
    if inventory.qos is None:
        yield inventory.name, "the inventory has no faultbed_qos to compare with"
        return
    for where, raw in _of_rnics(inventory, state, "qos"):
        have = qos(raw)
        if have.trust is None and have.pfc is None:
            yield where, complaint("mlnx_qos", raw)
        elif lacking := qos_unreported(have, trust=inventory.qos.trust):
            yield where, f"mlnx_qos does not report {', '.join(lacking)}"


def _of_rnics(inventory: Inventory, state: State, tool: str) -> Iterator[tuple[str, str]]:
    """Yield a tool's output for each RNIC, as (where, text)."""
    for host in inventory.topology.hosts:
        for rnic in host.rnics:
            yield f"{host.name}:{rnic.name}", state[host.name].raw.get(f"{tool} {rnic.name}", "")


RACK_CHECKS: tuple[Check, ...] = (
    Check(
        name="pcie",
        method="current_link_* and max_link_* of each RNIC in sysfs",
        expected="as fast and as wide as the RNIC supports; a slot that is slower by design is reported, too",
        do="reseat the card; check the slot's bifurcation in the BIOS",
        problems=_wrong_values("pcie", pcie_wrong),
        undetermined=_pcie_undetermined,
        labs=("rack",),
        inapplicable_why="RNICs of a soft lab are software, without a PCIe link",
    ),
    Check(
        name="speed",
        method="/sys/class/net/*/speed of each RNIC",
        expected="speed_gbps of the inventory; the burn-in cannot find this: equally slow pairs are no outliers",
        do="check the optics, and speed and lanes of the switch port; both ends must have the same speed",
        problems=_speed,
        undetermined=_speed_undetermined,
        labs=("rack",),
        inapplicable_why="the speed that a virtual interface reports has no meaning",
    ),
    Check(
        name="link-quality",
        method="`mlxlink -d RNIC -c`",
        expected="active, with FEC; few errors before FEC, far below what it can correct, and none after it",
        do="clean or replace the optics or the cable; both ends must have the same FEC",
        problems=_wrong_values("mlxlink", link_wrong),
        undetermined=_link_undetermined,
        labs=("rack",),
        inapplicable_why="RNICs of a soft lab are software: no optics, no FEC",
    ),
    Check(
        name="fec",
        method="`ethtool -I --show-fec NETDEV` and `ethtool -S NETDEV`, twice, some seconds apart",
        expected="FEC is active, corrects few bits, and the number of uncorrected errors does not grow",
        do="clean or replace the optics or the cable at both ends of that port",
        problems=fec.problems,
        undetermined=fec.undetermined,
        labs=("rack",),
        inapplicable_why="RNICs of a soft lab are software: no optics, no FEC",
    ),
    Check(
        name="qos",
        method="`mlnx_qos -i NETDEV`",
        expected="trust, PFC and DSCP map as in the lab's faultbed_qos and faultbed_dscp_map",
        do="set what differs; one RNIC with another map pauses the wrong class in the whole lab",
        problems=_qos,
        undetermined=_qos_undetermined,
        labs=("rack",),
        inapplicable_why="soft-RoCE has neither PFC nor DSCP maps",
    ),
    Check(
        name="switch-qos",
        method="QoS and buffer tables of each SONiC switch (`sonic-cfggen -d`, `sonic-db-dump -n APPL_DB`)",
        expected="PFC and DSCP map of the inventory; buffers for all in use, lossless ones for PFC; strict CNPs",
        do="set what differs (role sonic_switch), after `config qos reload`; both ends of a cable need the same",
        problems=switch_qos.problems,
        undetermined=switch_qos.undetermined,
        labs=("rack",),
        inapplicable_why="the switches of a soft lab have neither PFC nor DSCP maps",
    ),
    Check(
        name="switch-port",
        method="PORT, BREAKOUT_CFG and CABLE_LENGTH of each SONiC switch (`sonic-cfggen -d`)",
        expected="lanes, breakout, fec, autoneg and cable_m of the inventory, where it gives them",
        do="correct the port (`config interface`), or the inventory",
        problems=switch_ports.problems,
        undetermined=switch_ports.undetermined,
        labs=("rack",),
        inapplicable_why="the ports of a soft lab have no lanes and no FEC",
    ),
    Check(
        name="firmware",
        method="board_id and fw_ver of each RNIC in sysfs",
        expected="one version for all RNICs of one board",
        do="install the version of most RNICs on the others",
        problems=_firmware,
        undetermined=_firmware_undetermined,
        labs=("rack",),
        inapplicable_why="RNICs of a soft lab are software: no firmware",
    ),
    Check(
        name="golden",
        method="board_id, fw_ver and current_link_* of each RNIC in sysfs, NVML",
        expected="firmware, PCIe, GPU driver and VBIOS as in the lab's faultbed_golden",
        do="install the golden version on the host; if the lab has a new one, change the inventory",
        problems=golden.problems,
        undetermined=golden.undetermined,
        labs=("rack",),
        inapplicable_why="the machines of a soft lab are all made from one image",
    ),
    Check(
        name="affinity",
        method="paths and numa_node in /sys/bus/pci of each RNIC and of the GPU that the inventory pairs with it",
        expected="both below the same PCIe switch, at the inventory's addresses",
        do="correct the pairing (`gpu` of the RNIC) in the inventory, or move the card to the other slot",
        problems=affinity_check.problems,
        undetermined=affinity_check.undetermined,
        labs=("rack",),
        inapplicable_why="soft RNICs and GPUs are not on a PCI bus",
    ),
    Check(
        name="gpu",
        method="NVML, read by the host's watcher",
        expected="all GPUs answer, are not throttled, have equal settings, ECC, full PCIe width and persistence mode",
        do="check power, cooling and the slot; turn ECC on with `nvidia-smi -e 1`",
        problems=_gpus,
        undetermined=_gpus_undetermined,
        labs=("rack",),
        inapplicable_why="GPUs of a soft lab are processes, which the check soft-gpu reads",
    ),
    Check(
        name="abilities",
        method="python3 -V; tools, lockdown and KEEP_ETH_LINK_UP of hosts; release, ASIC and ACLs of SONiC switches",
        expected="Python 3.9 or later; anything else that faults need and is missing is reported with the fault kinds",
        do="install what is missing; `faultbed faults --here` checks each target",
        problems=abilities.problems,
        undetermined=abilities.undetermined,
        labs=("rack",),
        inapplicable_why="the image of a soft lab has everything that faults need",
    ),
    Check(
        name="time",
        method="`chronyc -c tracking`",
        expected="synchronised, within 1 ms of its source",
        do="check `chronyc sources`, or phc2sys on racks with PTP",
        problems=_time,
        undetermined=_time_undetermined,
        labs=("rack",),
        inapplicable_why="guests get their clock from QEMU, not from chrony; the check clock reads it",
    ),
)
