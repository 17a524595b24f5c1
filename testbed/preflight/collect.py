"""The facts that preflight reads from the machines of a lab.

One shell script per machine reads them, also for all switches that the machine carries. GPUs are read by the watcher of
their host. All facts come from the kernel, the daemons and the drivers, independently of what provisioning reported.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from faultbed.testbed.errors import LabError
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.inventory.rates import Shape
from faultbed.testbed.lab import Lab
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.testbed.model.topology import Host, Rnic
from faultbed.testbed.remote.remote_node import Node
from faultbed.testbed.side_by_side import on_each

__all__ = ["FAR_ADDRESS", "Facts", "Interface", "parse", "read_facts", "script"]

FAR_ADDRESS = "192.0.2.1"
"""An address that no machine has (RFC 5737). The route to it shows the default next hop of a source address."""

_MARK = "@@"
_SYSCTLS = "net.ipv4.ip_forward net.ipv4.fib_multipath_hash_policy net.ipv4.fib_multipath_hash_seed"
_CLOCK_EXCHANGES = 3
_PYTHON = f"echo {_MARK}raw able; echo python: $(python3 -V 2>&1)"
_TOOLS = {
    "mlxlink": "mlxlink mstlink",
    "mlxconfig": "mlxconfig mstconfig",
    **{name: name for name in ("nvidia-smi", "dcgmi", "mlnx_qos", "ethtool")},
}
_SONIC = """\
echo release: $(sonic-cfggen -y /etc/sonic/sonic_version.yml -v build_version 2>&1)
echo asic: $(sonic-cfggen -y /etc/sonic/sonic_version.yml -v asic_type 2>&1)
echo bgp restart: $(sonic-db-cli CONFIG_DB HGET 'FEATURE|bgp' auto_restart 2>&1)
for s in INGRESS EGRESS; do
echo acl $s: $(sonic-db-cli STATE_DB HGET "ACL_STAGE_CAPABILITY_TABLE|$s" action_list 2>&1)
done"""
_MLXCONFIG = "$(command -v mlxconfig || command -v mstconfig || echo mlxconfig)"
_MLXLINK = "$(command -v mlxlink || command -v mstlink || echo mlxlink)"
_FEC_APART_S = 2
"""Time between the two readings of FEC counters. A 400 Gb/s port sends 8e11 bits in it: a BER of 1e-11 is visible."""
_IN_NAMESPACE = f"""\
echo {_MARK}ip; printf 'addr show\\nroute show table all\\n' | ip -d -j -batch -
echo {_MARK}nft; nft -j list tables 2>/dev/null || ! command -v nft >/dev/null || echo {_MARK}failed nft
echo {_MARK}sysctl; sysctl -e {_SYSCTLS} 2>/dev/null"""
_PICK = "import json,sys; d=json.load(sys.stdin); print(json.dumps({k: d.get(k, {}) for k in sys.argv[1:]}))"
CONFIG_TABLES = (
    *("PORT_QOS_MAP", "DSCP_TO_TC_MAP", "TC_TO_PRIORITY_GROUP_MAP", "TC_TO_QUEUE_MAP"),
    *("PORT", "BREAKOUT_CFG", "CABLE_LENGTH"),
    *("BUFFER_POOL", "BUFFER_PROFILE", "BUFFER_PG", "BUFFER_QUEUE", "QUEUE", "SCHEDULER"),
)
_CONFIGDB = f"""\
echo {_MARK}raw configdb
{{ sonic-cfggen -d --print-data | python3 -c {shlex.quote(_PICK)} {" ".join(CONFIG_TABLES)}; }} 2>&1
echo {_MARK}raw appldb
sonic-db-dump -n APPL_DB -k 'BUFFER_*' -y 2>&1"""
"""Prints only those tables of ConfigDB that a check reads, because others have passwords. A missing table is empty."""
_QDISC = f"echo {_MARK}qdisc; tc -j qdisc show"
"""Used on soft labs only: no check of racks needs the qdiscs."""
_ON_MACHINE = f"""\
echo {_MARK}clock; date +%s.%N
echo {_MARK}rdma; rdma -j link show
echo {_MARK}gid; grep -rHsv "^0000:0000:0000:0000:0000:0000:0000:0000$" /sys/class/infiniband/*/ports/*/gids
echo {_MARK}gid-type; grep -rHs . /sys/class/infiniband/*/ports/*/gid_attrs/types
echo {_MARK}cpu.max; grep -Hs . /sys/fs/cgroup/faultbed.slice/*/cpu.max
echo {_MARK}unit; systemctl list-units --all --plain --no-legend "faultbed-*" || echo {_MARK}failed systemctl
echo {_MARK}revert; ls /run/faultbed/faults 2>/dev/null"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface. `queue` is the kind of its root qdisc, `shape` its rate limit and delay."""

    up: bool
    carrier: bool
    mtu: int
    mac: str
    addresses: frozenset[str]
    queue: str
    shape: Shape | None = None


@dataclass(kw_only=True)
class Facts:
    """The facts of one node.

    Attributes:
        next_hops: number of next hops by prefix.
        route_by_source: (device, gateway) of the default route, by source address.
        raw: output of a rack's tools, by tool and device (`mlxlink mlx5_0`).
        failed: tools that ended with an error, so that their facts may be incomplete.
        wall_s: the node's clock, in seconds since 1970.
        offset_s: offset of that clock from the controller's.
        offset_error_s: uncertainty of `offset_s`.
    """

    interfaces: dict[str, Interface] = field(default_factory=dict)
    next_hops: dict[str, int] = field(default_factory=dict)
    route_by_source: dict[str, tuple[str, str]] = field(default_factory=dict)
    sysctls: dict[str, str] = field(default_factory=dict)
    nft_tables: list[str] = field(default_factory=list)
    rdma: dict[str, tuple[str, str]] = field(default_factory=dict)
    gid_entries: dict[tuple[str, str, str], str] = field(default_factory=dict)
    gids: dict[str, set[str]] = field(default_factory=dict)
    sessions: dict[str, str] = field(default_factory=dict)
    cpu_max: dict[str, str] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    reverts: list[str] = field(default_factory=list)
    raw: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    wall_s: float | None = None
    offset_s: float = 0.0
    offset_error_s: float = 0.0


def read_facts(lab: Lab, *, timeout_s: float = 120.0, silent: dict[str, str] | None = None) -> dict[str, Facts]:
    """Return the facts of every host, switch and carrier of a lab, read from all machines at once.

    If `silent` is given, a host that does not answer is left out of the result, and its reason is added to `silent`.

    Raises:
        Unreachable: a machine does not answer.
        LabError: an answer is incomplete.
    """

    def read_or_record(machine: str) -> dict[str, Facts]:
        try:
            return _read_machine(lab, machine, timeout_s=timeout_s)
        except LabError as error:
            if silent is None or machine not in lab.topology.host_by_name:
                raise
            silent[machine] = str(error)
            return {}

    machines = lab.nodes()
    answers = on_each(machines, read_or_record, timeout_s=2 * timeout_s)
    return {name: facts for answer in answers for name, facts in answer.items()}


def _read_machine(lab: Lab, machine: str, *, timeout_s: float) -> dict[str, Facts]:
    """Return the facts of a machine and of the switches that it carries, by name."""
    sent_s = time.time()
    done = lab.node(machine).run(["sh", "-c", script(lab.inventory_model, machine)], check=False, timeout_s=timeout_s)
    received_s = time.time()
    try:
        nodes = parse(done.stdout)
    except LabError as error:
        raise LabError(f"{machine}: {error}{_stderr_note(done.stderr)}") from None
    facts = nodes.get(machine)
    if facts is None or facts.wall_s is None:
        raise LabError(f"{machine}: preflight printed no facts; run it again{_stderr_note(done.stderr)}")
    offsets = [_offset(facts.wall_s, sent_s, received_s)]
    if not traits_of(lab.inventory_model.kind).is_emulated:
        # The tools of a rack take seconds, so that the script alone cannot show a small offset.
        offsets += _clock_offsets(lab.node(machine))
    facts.offset_s, facts.offset_error_s = min(offsets, key=lambda offset_and_error: offset_and_error[1])
    host = lab.topology.host_by_name.get(machine)
    if host is not None and host.gpus:
        facts.raw["gpu"] = _gpus_as_json(lab, machine, timeout_s=timeout_s)
    return nodes


def _gpus_as_json(lab: Lab, machine: str, *, timeout_s: float) -> str:
    """Return the facts of a host's GPUs: from NVML, or the synthetic ones of soft GPUs. Not yet run on hardware."""
    try:
        answer = lab.request(machine, {"do": "gpus"}, timeout_s=timeout_s)
    except LabError as error:
        answer = {"why": str(error), "gpus": []}
    return json.dumps(answer)


def _offset(wall_s: float, sent_s: float, received_s: float) -> tuple[float, float]:
    """Return the offset of a clock, and its uncertainty, in seconds.

    The clock showed `wall_s` at an unknown time between request and answer (Cristian 1989).
    """
    return wall_s - (sent_s + received_s) / 2, (received_s - sent_s) / 2


def _clock_offsets(node: Node) -> list[tuple[float, float]]:
    """Return several (offset, uncertainty) of a machine's clock, in seconds. The quickest exchange is most precise."""
    offsets = []
    for _ in range(_CLOCK_EXCHANGES):
        sent_s = time.time()
        done = node.run(["date", "+%s.%N"], check=False)
        received_s = time.time()
        with contextlib.suppress(ValueError):
            offsets.append(_offset(float(done.stdout), sent_s, received_s))
    return offsets


def _stderr_note(stderr: str) -> str:
    """Return the end of stderr for an error message. It may be the cause, for example that sudo needs a password."""
    return f"; its stderr: {stderr.strip()[-200:]}" if stderr.strip() else ""


def script(inventory: Inventory, machine: str) -> str:
    """Return the shell script that prints the facts of a machine and of the switches that it carries."""
    topology = inventory.topology
    is_emulated = traits_of(inventory.kind).is_emulated
    per_namespace = f"{_IN_NAMESPACE}\n{_QDISC}" if is_emulated else _IN_NAMESPACE
    # LC_ALL: the parsers match the tools' untranslated output.
    lines = ["export LC_ALL=C", f"echo {_MARK}node {machine}", per_namespace, _ON_MACHINE]
    if host := topology.host_by_name.get(machine):
        commands = "\\n".join(f"route get {FAR_ADDRESS} from {rnic.ip}" for rnic in host.rnics)
        lines.append(f"echo {_MARK}sends; printf '{commands}\\n' | ip -j -force -batch - 2>/dev/null")
        if not is_emulated:
            lines += _rack_lines(host)
    for name, switch in topology.switch_by_name.items():
        netns = inventory.netns.get(name)
        if switch.carrier == machine and netns:
            lines.append(f"echo {_MARK}node {name}\nip netns exec {netns} sh <<'END'\n{per_namespace}\nEND")
            lines.append(_bgp(f"-N {netns} "))
        elif name == machine:
            lines.append(_bgp(""))
            lines += [] if is_emulated else [_PYTHON]
            lines += [] if switch.is_linux else [_SONIC, _CONFIGDB]
    return "\n".join([*lines, f"echo {_MARK}end", "true"])


def _rack_lines(host: Host) -> list[str]:
    """Return the lines of the script for hardware. Not yet run on hardware.

    If a tool is missing, its output is the error of the shell.
    FEC counters are read twice, because only their growth matters. mlxlink gets the PCI address instead of the RNIC's
    name: it accepts only names like mlx5_N (mstflint, mtcr_ul_com.c), and current hosts have names like rocep24s0.
    """
    lines = [
        _PYTHON,
        "echo lockdown: $(cat /sys/kernel/security/lockdown 2>/dev/null)",
        *(
            f"for t in {names}; do command -v $t >/dev/null && echo tool {tool}: $t && break; done"
            for tool, names in _TOOLS.items()
        ),
        f"echo {_MARK}raw pci; readlink -f /sys/bus/pci/devices/*",
        f"echo {_MARK}raw numa; grep -s . /sys/bus/pci/devices/*/numa_node",
        *_fec_lines(host, "first"),
    ]
    for rnic in host.rnics:
        name, netdev = shlex.quote(rnic.name), shlex.quote(rnic.netdev)
        device = f"/sys/class/infiniband/{name}"
        links = f"{device}/device/current_link_* {device}/device/max_link_*"
        lines += [
            f"echo {_MARK}raw device {name}; readlink -f {device}/device",
            f"echo {_MARK}raw pcie {name}; for f in {links}; do echo $(basename $f): $(cat $f); done 2>/dev/null",
            f"echo {_MARK}raw firmware {name}; cat {device}/board_id {device}/fw_ver 2>/dev/null",
            f"echo {_MARK}raw mlxlink {name}; at=$(readlink -f {device}/device); {_MLXLINK} -d ${{at##*/}} -c 2>&1",
            f"echo {_MARK}raw keep-up {name}; {_MLXCONFIG} -d ${{at##*/}} -e query {_keep_up(rnic)} 2>&1",
            f"echo {_MARK}raw qos {name}; mlnx_qos -i {netdev} 2>&1",
        ]
    lines.append(f"echo {_MARK}raw chrony; chronyc -c tracking 2>&1")
    return [*lines, f"sleep {_FEC_APART_S}", *_fec_lines(host, "last")]


def _keep_up(rnic: Rnic) -> str:
    """Return the name of the firmware setting that keeps a port up. A card's second port is its second PCI function."""
    function = (rnic.pcie or "").rpartition(".")[2]
    return f"KEEP_ETH_LINK_UP_P{int(function) + 1 if function.isdigit() else 1}"


def _fec_lines(host: Host, reading: str) -> list[str]:
    return [
        f"echo {_MARK}raw fec-{reading} {shlex.quote(rnic.name)}; echo at: $(date +%s.%N); "
        f"echo speed: $(cat /sys/class/net/{netdev}/speed 2>/dev/null); "
        f"ethtool -I --show-fec {netdev} 2>&1 || ethtool --show-fec {netdev} 2>&1; "
        f"ethtool -S {netdev} 2>/dev/null | grep _phy:"
        for rnic in host.rnics
        for netdev in [shlex.quote(rnic.netdev)]
    ]


def _bgp(vtysh_options: str) -> str:
    return f"echo {_MARK}bgp; vtysh {vtysh_options}-d bgpd -c 'show bgp ipv4 unicast summary json' 2>/dev/null"


def parse(text: str) -> dict[str, Facts]:
    """Parse the output of `script`, by node.

    Raises:
        LabError: the output is incomplete, or a section does not have the format of its tool.
    """
    nodes: dict[str, Facts] = {}
    facts, section, name, body = Facts(), "", "", list[str]()
    for line in text.splitlines():
        if not line.startswith(_MARK):
            body.append(line)
            continue
        if section == "raw":
            facts.raw[name] = "\n".join(body)
        if section == "failed":
            facts.failed.append(name)
        try:
            _READERS.get(section, _read_nothing)(facts, "\n".join(body))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            output = "\n".join(body)[:200]
            raise LabError(f"the answer to {section!r} cannot be parsed ({error}): {output!r}") from None
        section, _, name = line[len(_MARK) :].partition(" ")
        body = []
        if section == "node":
            facts = nodes.setdefault(name, Facts())
    if section != "end":
        raise LabError(f"the answer to preflight is cut off in its section {section!r}; run it again: {text[-200:]!r}")
    return nodes


def _read_nothing(_facts: Facts, _body: str) -> None:
    return


def _json_objects(body: str) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of all JSON lists in an output: `ip -j -batch` prints one list per command."""
    decoder, text, offset = json.JSONDecoder(), body.strip(), 0
    while (offset := text.find("[", offset)) >= 0:
        objects, offset = decoder.raw_decode(text, offset)
        yield from objects


def _read_ip(facts: Facts, body: str) -> None:
    for item in _json_objects(body):
        if "ifname" in item:
            facts.interfaces[item["ifname"]] = Interface(
                up="UP" in item["flags"],
                carrier="LOWER_UP" in item["flags"],
                mtu=item["mtu"],
                mac=item.get("address", ""),
                addresses=frozenset(
                    f"{address['local']}/{address['prefixlen']}"
                    for address in item.get("addr_info", ())
                    if address["family"] == "inet"
                ),
                queue=item.get("qdisc", "noqueue"),
            )
        elif "dst" in item and item.get("protocol") == "bgp":
            facts.next_hops[item["dst"]] = max(1, len(item.get("nexthops", ())))


def _read_qdisc(facts: Facts, body: str) -> None:
    for item in _json_objects(body):
        interface = facts.interfaces.get(item["dev"])
        if interface is None:
            continue
        if item.get("root"):
            facts.interfaces[item["dev"]] = replace(interface, queue=item["kind"])
        elif item["kind"] == "netem" and item.get("parent") == "1:2":  # playbooks/module_utils/faultbed_shapes.py
            options = item["options"]
            shape = Shape(
                rate_bps=options.get("rate", {}).get("rate", 0) * 8 or None,
                packets=options["limit"],
                delay_us=round(options.get("delay", {}).get("delay", 0) * 1e6),
            )
            facts.interfaces[item["dev"]] = replace(interface, shape=shape)


def _read_nft(facts: Facts, body: str) -> None:
    for item in json.loads(body or "{}").get("nftables", ()):
        if "table" in item:
            facts.nft_tables.append(f"{item['table']['family']} {item['table']['name']}")


def _read_sysctl(facts: Facts, body: str) -> None:
    facts.sysctls.update({name: " ".join(value.split()) for name, _, value in _split_lines(body, " = ")})


def _read_clock(facts: Facts, body: str) -> None:
    facts.wall_s = float(body)


def _read_rdma(facts: Facts, body: str) -> None:
    for item in _json_objects(body):
        name = item["ifname"].partition("/")[0]  # up to 2018 iproute2 printed mlx5_0/1 (rdma/link.c)
        facts.rdma[name] = (str(item.get("state")), str(item.get("netdev")))


def _read_gid(facts: Facts, body: str) -> None:
    """Read `/sys/class/infiniband/mlx5_0/ports/1/gids/3:0000:...:0a4d:0101`, a line for each entry in use."""
    for path, _, gid in _split_lines(body, ":"):
        if gid.strip("0:"):
            device, port, index = (path.split("/")[at] for at in (4, 6, -1))
            facts.gid_entries[device, port, index] = gid


def _read_gid_type(facts: Facts, body: str) -> None:
    """Read `/sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/3:RoCE v2`. An empty entry has no readable type."""
    for path, _, kind in _split_lines(body, ":"):
        device, port, index = (path.split("/")[at] for at in (4, 6, -1))
        gid = facts.gid_entries.get((device, port, index))
        if gid is not None and kind.strip() == "RoCE v2":
            facts.gids.setdefault(device, set()).add(gid)


def _read_sends(facts: Facts, body: str) -> None:
    for item in _json_objects(body):
        source = str(item.get("from") or item.get("prefsrc") or "")
        facts.route_by_source[source] = (str(item.get("dev")), str(item.get("gateway")))


def _read_bgp(facts: Facts, body: str) -> None:
    try:
        peers = json.loads(body or "{}").get("peers", {})
    except ValueError:
        peers = {}
    facts.sessions.update({str(name): str(peer.get("state")) for name, peer in peers.items()})


def _read_cpu_max(facts: Facts, body: str) -> None:
    facts.cpu_max.update({path.split("/")[-2]: value for path, _, value in _split_lines(body, ":")})


def _read_unit(facts: Facts, body: str) -> None:
    facts.units.update({line.split()[0]: line.split()[2] for line in body.splitlines() if len(line.split()) > 2})  # noqa: PLR2004


def _read_revert(facts: Facts, body: str) -> None:
    facts.reverts += body.split()


def _split_lines(body: str, separator: str) -> Iterator[tuple[str, str, str]]:
    yield from (line.partition(separator) for line in body.splitlines() if line.strip())


_READERS = {
    "ip": _read_ip,
    "qdisc": _read_qdisc,
    "nft": _read_nft,
    "sysctl": _read_sysctl,
    "clock": _read_clock,
    "rdma": _read_rdma,
    "gid": _read_gid,
    "gid-type": _read_gid_type,
    "sends": _read_sends,
    "bgp": _read_bgp,
    "cpu.max": _read_cpu_max,
    "unit": _read_unit,
    "revert": _read_revert,
}
