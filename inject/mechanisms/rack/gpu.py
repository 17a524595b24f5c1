"""GPUs: clocks, power limits and removal by `nvidia-smi`, neighbours, events by DCGM. Not yet run on hardware.

`-lgc`, `-rgc`, `-pl` and the fields of `--query-gpu` are options of nvidia-smi (its manual page, `--help-query-gpu`).
A locked clock has no event reason. It shows only because the GPU keeps that clock, busy or idle
(`faultbed.testbed.node.gpu.nvml.clocks_set`). A GPU whose clock is locked already is refused, because nvidia-smi does
not report the lock, so it could not be restored. `dcgmi test --inject` writes a value only into DCGM's cache (DCGM
documentation, "Error injection"): programs that read DCGM see it, the GPU does not change.

The driver itself removes a GPU from the bus (NVML, "Drain states": nvmlDeviceModifyDrainState, nvmlDeviceRemoveGpu)
and fails if it is in use. A `remove` written into sysfs does not fail: the driver waits inside the kernel, where
no signal is delivered, until every user of the GPU has closed it, the persistence daemon included
(open-gpu-kernel-modules, nv_pci_remove_helper).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from faultbed.inject.mechanisms.mechanism import Mechanism, Request, Step, flap_edges, holder_request, on_host
from faultbed.inject.mechanisms.rack.rack_mechanism import PCI, Commands, RackMechanism, by_commands
from faultbed.testbed.errors import Unsupported
from faultbed.testbed.node.gpu.nvml import TOP_SHARE
from faultbed.testbed.node.gpu.xid import XIDS

__all__ = ["BY_KIND", "MECHANISMS"]

MECHANISMS = (
    RackMechanism(
        kind="gpu.throttle",
        fidelity="real",
        by="nvidia-smi: locked clocks (-lgc), read back by the clock; refused if they are locked already",
    ),
    RackMechanism(
        kind="gpu.power-cap", fidelity="real", by="nvidia-smi: power limit (-pl), read back; must be reached to count"
    ),
    RackMechanism(
        kind="gpu.xid", fidelity="modelled", by="DCGM: a value injected into its cache (dcgmi test --inject)"
    ),
    *(
        RackMechanism(
            kind=kind,
            fidelity="modelled",
            by=f"DCGM: {values} injected into its cache (dcgmi test --inject); the GPU and NVML do not show it",
        )
        for kind, values in (
            ("gpu.ecc", "ECC errors and their XID"),
            ("gpu.row-remap", "the flag and its XID"),
            ("gpu.overheat", "a temperature"),
        )
    ),
    RackMechanism(
        kind="gpu.noisy-neighbour",
        fidelity="real",
        by="the CUDA driver: processes that compute on the same GPU, as NVML lists them",
    ),
    RackMechanism(
        kind="gpu.lost",
        fidelity="real",
        by="nvidia-smi: drained and removed by the driver, then a PCIe rescan; refused if a process has it open",
    ),
)
_GPU_DAEMONS = "nvidia-fabricmanager nvidia-dcgm dcgm nvidia-persistenced"
"""Services that use a GPU, according to NVIDIA; on HGX machines the first one always runs."""
XID_FIELD = "230"
"""DCGM_FI_DEV_XID_ERRORS (dcgm_fields.h)."""
ECC_FIELDS = {"corrected": "310", "uncorrected": "311"}
"""DCGM_FI_DEV_ECC_SBE_VOL_TOTAL and DCGM_FI_DEV_ECC_DBE_VOL_TOTAL."""
REMAP_FIELDS = {"failed": "395", "pending": "396"}
"""DCGM_FI_DEV_ROW_REMAP_FAILURE and DCGM_FI_DEV_ROW_REMAP_PENDING."""
TEMPERATURE_FIELD = "150"
"""DCGM_FI_DEV_GPU_TEMP."""
_BUSY_PERCENT = 50
"""A GPU that is busy for this share of the time, or longer, does not lower its clock by itself."""
_STEP_MHZ = 15
"""Distance between the clocks of an H100. nvidia-smi sets the nearest one that the GPU has."""


def _bus(request: Request) -> str:
    gpu = request.target.gpu
    if gpu is None or gpu.pcie is None:
        raise Unsupported(
            f"{request.where}.target: not supported on this lab: the inventory has no pcie for it; add it"
        )
    return gpu.pcie


def _query(bus: str, fields: str) -> tuple[str, ...]:
    return ("nvidia-smi", "-i", bus, f"--query-gpu={fields}", "--format=csv,noheader,nounits")


def _throttle(request: Request) -> Mechanism:
    bus, left = _bus(request), f"{100 - request.spec.params['percent']:g}"
    limit = f"int({{max}} * {left} / 100)"
    query = " ".join(_query(bus, "clocks_event_reasons.active,clocks.sm,utilization.gpu"))
    once = f"w=$({query} | awk -F', *' '{_clock_state(limit)}')"
    # A clock that is still rising looks locked, too: the next reading finds it at the top.
    look = f'for i in 1 2 3; do {once}; case $w in locked*) sleep 0.3;; *) break;; esac; done; echo "$w"'
    commands = Commands(
        needs=("nvidia-smi", "awk"),
        remember={"max": (_query(bus, "clocks.max.sm"), "^([0-9]+)$")},
        on=(("sh", "-c", f"mhz=$(awk 'BEGIN {{ print {limit} }}'); nvidia-smi -i {bus} -lgc $mhz,$mhz"),),
        off=(("nvidia-smi", "-i", bus, "-rgc"),),
        look=("sh", "-c", look),
        applied="^held",
        normal="^free",
        gone="^(free|locked|slowed)",
        lost="^(free|locked|slowed) high",
        unclear="an idle or a hot GPU has a low clock, too: only a busy one shows that its clock is still locked",
    )
    return _on_gpu(request, commands, bus, state="clocks_set")


def _clock_state(limit: str) -> str:
    """Return an awk program that prints the state of a GPU's clock: held, slowed, locked or free.

    The second word is `low` if the clock is at `limit` or below, else `high`. The program's fields are the active event
    reasons (a hexadecimal bit mask, nvml.h), the SM clock in MHz and the busy time in percent. `held` means by this
    limit, `slowed` means by heat or power, `locked` means by another lock. A line without such fields, as of a GPU that
    does not answer, is `unreadable`.
    """
    statements = (
        f"low = $2 <= {limit} + {_STEP_MHZ}",
        "no_reason = $1 ~ /^0x0+$/",
        "by_setting = $1 ~ /[2367abefABEF]$/",  # 0x2: clocks set by a user
        "by_heat_or_power = $1 ~ /[4-9a-fA-F]$/ || $1 ~ /[2-9a-fA-F].$/",  # 0x4 to 0x80 without 0x10
        f"held = by_setting || low && !by_heat_or_power && (no_reason || $3 >= {_BUSY_PERCENT})",
        f"locked = no_reason && $2 < {{max}} * {TOP_SHARE}",
        'state = held ? "held" : low && by_heat_or_power ? "slowed" : locked ? "locked" : "free"',
        'if ($1 !~ /^0x/ || $2 !~ /^[0-9]+$/) state = "unreadable:"',
        'print state, (low ? "low" : "high"), $0',
    )
    return f"{{ {'; '.join(statements)} }}"


def _power_cap(request: Request) -> Mechanism:
    bus, left = _bus(request), f"{100 - request.spec.params['percent']:g}"
    watts = f"$(awk 'BEGIN {{ print int({{most}} * {left} / 100) }}')"
    look = (
        f"now=$({' '.join(_query(bus, 'power.limit'))}); "
        'case ${now%%.*} in ""|*[!0-9]*) echo "unreadable: $now"; exit;; esac; '
        f'[ "${{now%%.*}}" -le "{watts}" ] && echo capped $now || echo free $now'
    )
    commands = Commands(
        needs=("nvidia-smi", "awk"),
        remember={
            "was": (_query(bus, "power.limit"), r"^([0-9]+)"),
            "most": (_query(bus, "power.default_limit"), r"^([0-9]+)"),
            "least": (_query(bus, "power.min_limit"), r"^([0-9]+)"),
        },
        # nvidia-smi refuses less than the GPU's minimum by itself; this message is clearer and comes before any change.
        on=(
            (
                "sh",
                "-c",
                f'[ "{watts}" -ge {{least}} ] || {{ echo "below the GPU limit of at least {{least}} W" >&2; exit 1; }}',
            ),
            ("sh", "-c", f'nvidia-smi -i {bus} -pl "{watts}"'),
        ),
        off=(("nvidia-smi", "-i", bus, "-pl", "{was}"),),
        look=("sh", "-c", look),
        applied="^capped",
        normal="^free",
        gone="^free",
    )
    return _on_gpu(request, commands, bus, state="power_capped")


def _on_gpu(request: Request, commands: Commands, bus: str, *, state: str) -> Mechanism:
    name = f"{request.target.node}/{request.target.gpu.name if request.target.gpu else ''}"
    return by_commands(
        request,
        commands,
        node=request.target.node,
        claims=f"{name}/clocks",
        shows={"gpu": bus},
        while_on=((f"{name}.{state}", 1),),
        restored=((f"{name}.{state}", 0),),
    )


def _xid(request: Request) -> Mechanism:
    # Without the offset the value is dated a second ahead (DCGM, dcgmi test --help).
    return _injected(request, {XID_FIELD: str(request.spec.params["xid"])}, offset_s=(0, 0), edges=flap_edges(request))


def _ecc(request: Request) -> Mechanism:
    error, count = request.spec.params["error"], request.spec.params["count"]
    if request.spec.params["rate"]:
        raise Unsupported(
            f"{request.where}.rate: not supported on this lab: a value is injected into DCGM once; use count"
        )
    field = ECC_FIELDS["corrected" if error in ("corrected", "high-rate") else "uncorrected"]
    event = {XID_FIELD: str(XIDS[error])} if error in XIDS else {}
    return _injected(request, {field: str(count), **event}, offset_s=_ahead_s(request))


def _row_remap(request: Request) -> Mechanism:
    state = request.spec.params["state"]
    return _injected(request, {REMAP_FIELDS[state]: "1", XID_FIELD: str(XIDS[state])}, offset_s=_ahead_s(request))


def _overheat(request: Request) -> Mechanism:
    celsius = str(int(request.spec.params["celsius"]))
    return _injected(request, {TEMPERATURE_FIELD: celsius}, offset_s=_ahead_s(request), normal="[0-9]+", restores=True)


def _ahead_s(request: Request) -> tuple[int, int]:
    """Return how far ahead a value and its revert are dated, in s.

    DCGM reads these fields from the driver regularly, and the value with the latest date counts. The injected value is
    therefore dated to the end of the window, and its revert later.
    """
    window_s = math.ceil(request.spec.for_s)
    return window_s, window_s + 1


def _injected(
    request: Request,
    values: Mapping[str, str],
    *,
    offset_s: tuple[int, int],
    normal: str = "(0|N/A)",
    restores: bool = False,
    edges: list[list[Any]] | None = None,
) -> Mechanism:
    """Return the mechanism that writes values, by field, into DCGM's cache; the first one is read back.

    `normal` is the pattern of the value before. `restores` writes that value back, instead of 0.
    """
    bus, field = _bus(request), next(iter(values))
    # DCGM numbers GPUs itself: its number can differ from NVML's, and its bus ids have eight digits of domain.
    entity, tail = "{entity}", re.escape(bus.partition(":")[2])
    look = ("dcgmi", "dmon", "-i", entity, "-e", field, "-c", "1")

    def inject(ahead_s: int, field_id: str, value: str) -> tuple[str, ...]:
        return ("dcgmi", "test", "--inject", "--gpuid", entity, "--offset", str(ahead_s), "-f", field_id, "-v", value)

    was = {"was": (look, r"^GPU +[0-9]+ +([0-9]+)")} if restores else {}
    commands = Commands(
        needs=("dcgmi",),
        remember={
            "entity": (
                ("dcgmi", "discovery", "-l"),
                rf"(?i)^\| *([0-9]+) +\| Name:[^\n]*\n\|[^\n]*PCI Bus ID: *[0-9a-f]*:{tail}",
            ),
            **was,
        },
        on=tuple(inject(offset_s[0], field_id, value) for field_id, value in values.items()),
        off=tuple(inject(offset_s[1], field_id, "{was}" if restores else "0") for field_id in values),
        look=look,
        applied=f"^GPU +{entity} +{values[field]}( |$)",
        normal=f"^GPU +{entity} +{normal}( |$)",
        gone=f"^GPU +{entity} +{normal}( |$)",
        unclear=None if offset_s == (0, 0) else "DCGM's own reading replaces a value at the end of its window",
    )
    claims = f"{request.target.node}/{request.target.gpu.name if request.target.gpu else bus}/dcgm"
    return by_commands(request, commands, node=request.target.node, claims=claims, shows={"gpu": bus}, edges=edges)


def _noisy_neighbour(request: Request) -> Mechanism:
    bus, count, host = _bus(request), request.spec.params["neighbours"], request.target.node
    gpu = f"{host}/{request.target.gpu.name if request.target.gpu else ''}"
    busy = f"{host}/hogs.running"
    return Mechanism(
        place=on_host(request),
        request=holder_request(request, "gpu_neighbour", {"pcie": bus, "count": count}, claims=f"{host}/hog"),
        steps=(Step(do=f"# {count} processes that compute on GPU {bus} without pause (CUDA driver)", undo="kill %1"),),
        must_move=(),
        must_not_move=(),
        # The driver lists the processes on a GPU, independently of the holder.
        while_on=((busy, count), (f"{gpu}.neighbours", count)),
        restored=((busy, 0),),
        shows={"gpu": bus, "processes": count, "computing": count},
    )


def _lost(request: Request) -> Mechanism:
    bus, host = _bus(request), request.target.node
    drain, device_path = ("nvidia-smi", "drain", "-p", bus), f"{PCI}/devices/{bus}"
    commands = Commands(
        needs=("nvidia-smi",),
        able=(
            (("test", "-w", f"{PCI}/rescan"), "^", "the PCI bus cannot be rescanned; use an account with root"),
            (
                ("nvidia-smi", "-i", bus, "--query-compute-apps=pid", "--format=csv,noheader"),
                r"\A\s*\Z",
                "a process computes on this GPU, and the driver removes no GPU in use; end it, or use gpu.throttle",
            ),
            (
                ("sh", "-c", f"for s in {_GPU_DAEMONS}; do systemctl is-active --quiet $s && echo $s; done; true"),
                r"\A\s*\Z",
                "a daemon has this GPU open, and the driver removes no GPU in use; stop it, or use gpu.throttle",
            ),
        ),
        remember={"persistence": (_query(bus, "persistence_mode"), "^(Enabled|Disabled)$")},
        # Persistence mode counts as a use of the GPU (nvmlDeviceRemoveGpu).
        on=(("nvidia-smi", "-i", bus, "-pm", "0"), (*drain, "-m", "1"), (*drain, "-r")),
        off=(
            ("sh", "-c", f"[ -e {device_path} ] || echo 1 > {PCI}/rescan"),
            (*drain, "-m", "0"),
            ("sh", "-c", f'[ "{{persistence}}" = Disabled ] || nvidia-smi -i {bus} -pm 1'),
        ),
        look=("sh", "-c", f"[ -e {device_path} ] && echo present || echo absent"),
        applied="^absent$",
        normal="^present$",
        settle_s=20.0,
    )
    return by_commands(request, commands, node=host, claims=f"{host}/{bus}", shows={"pcie": bus})


BY_KIND: Mapping[tuple[str, str], Callable[[Request], Mechanism]] = {
    ("gpu.throttle", "gpu"): _throttle,
    ("gpu.power-cap", "gpu"): _power_cap,
    ("gpu.xid", "gpu"): _xid,
    ("gpu.ecc", "gpu"): _ecc,
    ("gpu.row-remap", "gpu"): _row_remap,
    ("gpu.overheat", "gpu"): _overheat,
    ("gpu.noisy-neighbour", "gpu"): _noisy_neighbour,
    ("gpu.lost", "gpu"): _lost,
}
