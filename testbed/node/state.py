"""The state of a machine and of every switch on it, in every respect that a fault could change: facts as text.

The facts come from the kernel: each command that a shell would start costs a tenth of a second under emulation. Numbers
that the kernel assigns freely (interface indexes, next-hop ids, lifetimes) are translated or left out, and so are
counters.

Formats: linux/rtnetlink.h, if_link.h, if_addr.h, fib_rules.h, pkt_sched.h, netfilter/nf_tables.h.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import struct
import sys
from collections.abc import Collection, Iterator

from faultbed.testbed.node import netns, settings, systemd_units
from faultbed.testbed.node.counts import is_full, stepped_s
from faultbed.testbed.node.gpu import health
from faultbed.testbed.node.kernel_files import entries, read
from faultbed.testbed.node.netlink import RTA_MULTIPATH, Netlink, attributes, next_hops
from faultbed.testbed.node.routing.owned_numbers import PROTOCOL

__all__ = [
    "Facts",
    "address_facts",
    "filter_fact",
    "gathered",
    "inet_facts",
    "link_change",
    "link_fact",
    "network_facts",
    "nexthop_fact",
    "path_mtu_facts",
    "program_of",
    "qdisc_fact",
    "read_nodes",
    "route_facts",
    "rule_fact",
]

Facts = Iterator[tuple[str, str]]
"""Subject and text, such as `("link be0", "LOWER_UP UP mtu 4200 qdisc pfifo 52:54:...")`."""

SYSCTLS = (
    "net.ipv4.ip_forward",
    "net.ipv4.fib_multipath_hash_policy",
    "net.ipv4.fib_multipath_hash_seed",
    "net.ipv4.conf.all.rp_filter",
    "net.ipv4.ip_no_pmtu_disc",
    "net.ipv4.tcp_congestion_control",
)
DAEMONS = ("zebra", "bgpd", "mgmtd", "watchfrr")
_OURS = "faultbed."
_UNCOUNTED = ("faultbed.testbed.node.watch", "faultbed.testbed.node.warm.warm_parent")
"""Our programs that run whether or not a command uses the machine, or as long as a lab is open."""
_NAMED = "faultbed-"
"""Prefix of the names of faults' processes (`faultbed.inject.node.machine.hog`)."""
_UNITS, _UNITS_S = "faultbed-*", 30.0
_INFINIBAND, _SLICE = "/sys/class/infiniband", "/sys/fs/cgroup/faultbed.slice"

_NO_GROUP = (errno.ENOTDIR, errno.ENOENT, errno.ENODEV)
"""Errors from reading a file of a cgroup that has ended, or in a folder entry that is no cgroup."""

_ROUTE, _NETFILTER = 0, 12
_GETLINK, _GETADDR, _GETROUTE, _GETRULE, _GETQDISC, _GETTFILTER, _GETNEIGH = 18, 22, 26, 34, 38, 46, 30
_GETNEXTHOP, _GETNETCONF = 106, 82
_NETCONFA_INDEX, _NETCONFA = 1, {2: "forwarding", 3: "rp_filter"}
_FLAGS = {1 << 0: "UP", 1 << 7: "NOARP", 1 << 8: "PROMISC", 1 << 16: "LOWER_UP"}
_PERMANENT = 0x80
_ROOT, _CLSACT = 0xFFFFFFFF, 0xFFFFFFF1
_HOOKS = {0xFFFFFFF2: "ingress", 0xFFFFFFF3: "egress"}
_TCMSG = struct.Struct("=B3xiIII")
ROUTE_SETTINGS = "settings of "
"""Prefix of a fact about a route; the route's subject follows."""
_SHAPED = "prio"
"""Kind of the queue in front of a shaped port's filters (playbooks/module_utils/faultbed_shapes.py)."""
_NETEM_RATE, _NETEM_RATE64, _NETEM_LATENCY64 = 6, 8, 10
_NETEM_DRAWS = (1, 3, 4, 5, 11, 12)  # correlations, reordering, corruption, loss model, 64-bit jitter, slots
_KERNEL, _RA = 2, 9
_CLONED = 0x200
_PROTOCOLS = {2: "kernel", 3: "boot", 4: "static", 9: "ra", 11: "zebra", 16: "dhcp", 186: "bgp"}
_TYPES = {
    1: "unicast",
    2: "local",
    3: "broadcast",
    4: "anycast",
    5: "multicast",
    6: "blackhole",
    7: "unreachable",
    8: "prohibit",
}
_RULE_KNOWN = (1, 2, 6, 15, 21)
_TABLES = {254: "main", 255: "local", 253: "default"}
_DEAD, _LINKDOWN = 1, 16


def network_facts() -> Facts:
    """Yield everything in a namespace from links and routes to filters, nftables and sysctls."""
    with contextlib.closing(Netlink(_ROUTE)) as route:
        links = {
            struct.unpack_from("=i", body, 4)[0]: (struct.unpack_from("=I", body, 8)[0], attributes(body[16:]))
            for _, body in route.dump(_GETLINK, bytes(16))
        }
        names = {index: _text(attrs[3]) for index, (_, attrs) in links.items()}
        yield from (link_fact(flags, attrs, names) for flags, attrs in links.values())
        for _, body in route.dump(_GETNETCONF, bytes([socket.AF_INET, 0, 0, 0])):
            yield from inet_facts(body, names)
        for _, body in route.dump(_GETADDR, bytes(8)):
            yield from address_facts(body, names)
        soft = {netdev for _, netdev in _rdma_netdevs()}
        for _, body in route.dump(_GETROUTE, bytes(12)):
            yield from route_facts(body, names)
            yield from _route_settings(body, names)
            yield from path_mtu_facts(body, names, soft)
        for _, body in route.dump(_GETRULE, bytes(12)):
            yield rule_fact(body)
        yield from _scheme_facts(route, names)
        hooked: list[tuple[int, int]] = []
        for _, body in route.dump(_GETQDISC, bytes(20)):
            yield qdisc_fact(body, names)
            _family, index, handle, parent, _info = _TCMSG.unpack_from(body)
            hooked += [(index, hook) for hook in _HOOKS] if parent == _CLSACT else []
            hooked += [(index, handle)] if _text(attributes(body[20:])[1]) == _SHAPED else []
        for index, hook in hooked:
            filters = route.dump(_GETTFILTER, _TCMSG.pack(0, index, 0, hook, 0))
            # One u32 filter consists of a table and its entries.
            yield from dict.fromkeys(filter_fact(body, names) for _, body in filters)
        for _, body in route.dump(_GETNEIGH, bytes(12)):
            yield from settings.neighbour_facts(body, names)
        for netdev in filter(settings.is_hardware, names.values()):
            yield from settings.dcb_fact(route, netdev)
            yield from settings.ethtool_fact(netdev)
            yield from settings.dcqcn_facts(netdev)
    with contextlib.closing(Netlink(_NETFILTER)) as netfilter:
        yield from settings.nft_facts(netfilter)
    for name in SYSCTLS:
        with contextlib.suppress(OSError):
            yield f"sysctl {name}", " ".join(read(f"/proc/sys/{name.replace('.', '/')}").split())


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode()


def _number(raw: bytes | None, default: int = 0) -> int:
    return int.from_bytes(raw, sys.byteorder) if raw else default


def link_fact(flags: int, values: dict[int, bytes], names: dict[int, str]) -> tuple[str, str]:
    """Return the fact of an interface, from its flags and attributes; `names` are all interfaces by index."""
    words = [" ".join(sorted(word for bit, word in _FLAGS.items() if flags & bit)) or "down"]
    words += [f"mtu {_number(values.get(4))}", f"qdisc {_text(values.get(6, b''))}", values.get(1, b"").hex(":")]
    words.append(_text(attributes(values.get(18, b"")).get(1, b"")))
    if 10 in values:  # noqa: PLR2004 (IFLA_MASTER)
        words.append(f"master {names.get(_number(values[10]), '?')}")
    return f"link {_text(values[3])}", " ".join(filter(None, words))


def link_change(body: bytes, names: dict[int, str]) -> tuple[int, str, str]:
    """Return an interface's index and its fact, from an RTM_NEWLINK or RTM_DELLINK notification."""
    index, flags = struct.unpack_from("=iI", body, 4)
    subject, text = link_fact(flags, attributes(body[16:]), names)
    return index, subject, text


def _scheme_facts(route: Netlink, names: dict[int, str]) -> Facts:
    """Yield the next hops and groups of routing schemes. Other daemons renumber theirs, so those are left out."""
    with contextlib.suppress(OSError):  # before Linux 5.3 there are none
        for _, body in route.dump(_GETNEXTHOP, bytes(8)):
            if body[2] == PROTOCOL:
                yield nexthop_fact(body, names)


def nexthop_fact(body: bytes, names: dict[int, str]) -> tuple[str, str]:
    """Return the fact of a next-hop object, or of a group, from an RTM_NEWNEXTHOP body (linux/nexthop.h)."""
    family, _scope, _protocol, _pad, flags = struct.unpack_from("=BBBBI", body)
    attrs = attributes(body[8:])
    subject = f"nexthop {_number(attrs.get(1))}"
    if 2 in attrs:  # noqa: PLR2004 (NHA_GROUP: entries of eight bytes, each begins with the id of a member)
        members = sorted(struct.unpack_from("=I", attrs[2], at)[0] for at in range(0, len(attrs[2]), 8))
        return subject, "group " + " ".join(map(str, members))
    via = f"via {socket.inet_ntop(family, attrs[6])} " if 6 in attrs else ""  # noqa: PLR2004 (NHA_GATEWAY)
    state = [word for bit, word in ((_DEAD, "dead"), (_LINKDOWN, "linkdown")) if flags & bit]
    return subject, " ".join([f"{via}dev {names.get(_number(attrs.get(5)))}", *state])


def inet_facts(body: bytes, names: dict[int, str]) -> Facts:
    """Yield an interface's own settings of IPv4, from an RTM_NEWNETCONF body (linux/netconf.h).

    They decide with those of all interfaces: a port that does not forward, or checks sources, drops packets.
    """
    attrs = attributes(body[4:])
    netdev = names.get(_number(attrs.get(_NETCONFA_INDEX)))
    if netdev is not None:
        yield f"inet {netdev}", " ".join(f"{name} {_number(attrs.get(kind))}" for kind, name in _NETCONFA.items())


def address_facts(body: bytes, names: dict[int, str]) -> Facts:
    """Yield subject and text of an interface address, from the body of its netlink message."""
    family, length, flags, scope, index = struct.unpack_from("=BBBBi", body)
    attrs = attributes(body[8:])
    # Addresses from router advertisements come and go by themselves.
    if _number(attrs.get(8), flags) & _PERMANENT:
        address = socket.inet_ntop(family, attrs.get(2, attrs.get(1, b"")))
        scope_name = {0: "global", 253: "link", 254: "host"}.get(scope, str(scope))
        yield f"address {names.get(index, index)} {address}/{length}", scope_name


def route_facts(body: bytes, names: dict[int, str]) -> Facts:
    """Yield the fact of a route, from an RTM_NEWROUTE body; nothing for routes that come and go by themselves."""
    family, length, _src, _tos, table, protocol, _scope, kind, flags = struct.unpack_from("=BBBBBBBBI", body)
    attrs = attributes(body[12:])
    table = _TABLES.get(number := _number(attrs.get(15), table), str(number))
    if protocol == _RA or table == "local" or flags & _CLONED:
        return
    if family not in (socket.AF_INET, socket.AF_INET6):
        return
    size = 4 if family == socket.AF_INET else 16
    to = f"{socket.inet_ntop(family, attrs.get(1, bytes(size)))}/{length}"
    hops = (
        list(next_hops(attrs[RTA_MULTIPATH])) if RTA_MULTIPATH in attrs else [(flags, _number(attrs.get(4)), 1, attrs)]
    )
    hop_texts = sorted(_next_hop(family, flags, index, attrs, names) for flags, index, _weight, attrs in hops)
    subject = f"route {table} {_TYPES.get(kind, kind)} {to} metric {_number(attrs.get(6))}"
    # Equal prefixes may occur twice in a table: with other metrics, or (fe80::/64) once per interface.
    if protocol == _KERNEL:
        subject += f" dev {names.get(hops[0][1])}"
    yield f"{subject} {_PROTOCOLS.get(protocol, protocol)}", ", ".join(hop_texts)


def _route_settings(body: bytes, names: dict[int, str]) -> Facts:
    """Yield the preferred source and the metrics (MTU, window, ...) of a route that has any."""
    attrs = attributes(body[12:])
    words = [f"src {socket.inet_ntop(body[0], attrs[7])}"] if 7 in attrs else []  # noqa: PLR2004 (RTA_PREFSRC)
    words += [f"metric {kind} {_number(raw)}" for kind, raw in sorted(attributes(attrs.get(8, b"")).items())]
    if words:
        for subject, _ in route_facts(body, names):
            yield f"{ROUTE_SETTINGS}{subject}", " ".join(words)


def path_mtu_facts(body: bytes, names: dict[int, str], soft: Collection[str]) -> Facts:
    """Yield a path MTU that the kernel has learnt by ICMP, from an RTM_NEWROUTE body.

    Yields nothing for interfaces outside of `soft`, the interfaces below software RDMA devices. Such a device sends by
    the kernel's routes, so it cannot send packets larger than the path MTU; a hardware RNIC ignores it. The kernel does
    not dump entries that were never used (route.c, fnhe_dump_bucket).
    """
    family, length, _src, _tos, _table, _protocol, _scope, _kind, flags = struct.unpack_from("=BBBBBBBBI", body)
    attrs = attributes(body[12:])
    mtu = attributes(attrs.get(8, b"")).get(2)  # RTA_METRICS, RTAX_MTU
    netdev = names.get(_number(attrs.get(4)), "?")
    if flags & _CLONED and mtu and netdev in soft and 1 in attrs:
        yield f"path mtu {netdev} {socket.inet_ntop(family, attrs[1])}/{length}", str(_number(mtu))


def _next_hop(family: int, flags: int, index: int, attrs: dict[int, bytes], names: dict[int, str]) -> str:
    via = ""
    if 5 in attrs:  # noqa: PLR2004 (RTA_GATEWAY)
        via = f"via {socket.inet_ntop(family, attrs[5])}"
    elif 18 in attrs:  # noqa: PLR2004 (RTA_VIA: a gateway of the other family)
        (gateway_family,) = struct.unpack_from("=H", attrs[18])
        via = f"via {socket.inet_ntop(gateway_family, attrs[18][2:])}"
    state = [word for bit, word in ((_DEAD, "dead"), (_LINKDOWN, "linkdown")) if flags & bit]
    return " ".join(filter(None, [via, f"dev {names.get(index)}", *state]))


def rule_fact(body: bytes) -> tuple[str, str]:
    """Return subject and text of a policy rule, from the body of its netlink message."""
    family, to_length, from_length = struct.unpack_from("=BBB", body)
    attrs = attributes(body[12:])
    table = _number(attrs.get(15), body[4])
    words = [f"lookup {_TABLES.get(table, table)}"]
    for attr, length, word in ((1, to_length, "to"), (2, from_length, "from")):
        if attr in attrs:
            words.append(f"{word} {socket.inet_ntop(family, attrs[attr])}/{length}")
    # Any other condition counts too, in hex. Attribute 21 (its origin) does not, and neither does 14 with "no limit".
    conditions = {kind: raw for kind, raw in attrs.items() if kind not in _RULE_KNOWN and raw != b"\xff\xff\xff\xff"}
    words += [f"attribute {kind} {raw.hex()}" for kind, raw in sorted(conditions.items())]
    name = "6" if family == socket.AF_INET6 else ""
    return f"rule{name} {_number(attrs.get(6))} {' '.join(words)}", "there"


def qdisc_fact(body: bytes, names: dict[int, str]) -> tuple[str, str]:
    """Return subject and text of a queue, from the body of its netlink message."""
    # The kernel assigns handles freely; the parent's says where a child is attached.
    _family, index, _handle, parent = struct.unpack_from("=B3xiII", body)
    attrs = attributes(body[20:])
    parent_text = "root" if parent == _ROOT else f"parent {parent >> 16:x}:{parent & 0xFFFF:x}"
    kind, options = _text(attrs[1]), attrs.get(2, b"")
    setting = f"limit {_number(options)}" if kind == "pfifo" else _netem(options) if kind == "netem" else options.hex()
    return f"qdisc {names.get(index, index)} {parent_text}", " ".join(filter(None, [kind, setting]))


def _netem(options: bytes) -> str:
    """Return a netem queue as text, from its options (linux/pkt_sched.h, struct tc_netem_qopt), without zeros.

    The seed is left out: each new queue gets another one, and it has no effect on a queue that draws nothing.
    """
    _latency, limit, loss, gap, duplicate, jitter = struct.unpack_from("=6I", options)
    attrs = attributes(options[24:])
    rate = attrs.get(_NETEM_RATE64) or attrs.get(_NETEM_RATE, b"")[:4]
    numbers = {
        "delay_ns": _number(attrs.get(_NETEM_LATENCY64)),
        "bytes_per_s": _number(rate),
        "loss": loss,
        "gap": gap,
        "duplicate": duplicate,
        "jitter": jitter,
    }
    draws = [f"{kind} {attrs[kind].hex()}" for kind in _NETEM_DRAWS if any(attrs.get(kind, b""))]
    return " ".join([f"limit {limit}", *(f"{name} {value}" for name, value in numbers.items() if value), *draws])


def filter_fact(body: bytes, names: dict[int, str]) -> tuple[str, str]:
    """Return the fact of a filter, from an RTM_NEWTFILTER body (struct tcmsg).

    The filter is at a hook of a port's clsact, or at the queue in front of a shaped port.
    """
    _family, index, _handle, parent, info = _TCMSG.unpack_from(body)
    return f"filter {names[index]} {_HOOKS.get(parent, f'{parent:x}')} {info >> 16}", _text(attributes(body[20:])[1])


def _rdma_netdevs() -> Iterator[tuple[str, str]]:
    """Yield software RDMA devices, and the interface below each of them."""
    for device in entries(_INFINIBAND):
        with contextlib.suppress(OSError):  # a hardware device, or deleted by now
            yield device, read(f"{_INFINIBAND}/{device}/parent").strip()


def _machine_facts() -> Facts:
    netdevs = dict(_rdma_netdevs())
    for device in entries(_INFINIBAND):
        below = netdevs.get(device)
        for port in entries(f"{_INFINIBAND}/{device}/ports"):
            at = f"{_INFINIBAND}/{device}/ports/{port}"
            words = [read(f"{at}/{name}").split(":")[-1].strip() for name in ("state", "phys_state")]
            yield f"rdma {device}/{port}", " ".join(filter(None, [*words, below and f"netdev {below}"]))
            yield from settings.gid_facts(device, port)
            yield from settings.roce_facts(device, port)
    yield from ((f"cpu.max {group}", text.strip()) for group, text in _of_groups("cpu.max"))
    yield from ((f"revert {name}", "there") for name in entries("/run/faultbed/faults") if name.endswith(".revert"))
    yield from ((f"netns {name}", "there") for name in entries("/run/netns"))
    yield "clock", f"set by {stepped_s()} s" if stepped_s() else "not set since it is watched"
    yield "disk", "full" if is_full("/var/lib") else "not full"
    with contextlib.suppress(FileNotFoundError):
        yield "receives", f"late by {read('/run/faultbed/late-receives').strip()} ms"
    yield from _process_facts()
    yield from settings.gpu_facts()
    yield from health.facts()
    yield from settings.sonic_facts()
    yield from ((f"processes {group}", str(len(text.split()))) for group, text in _of_groups("cgroup.procs"))


def _of_groups(file: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each cgroup of faultbed, and the content of the cgroup's file with this name."""
    for group in entries(_SLICE):
        try:
            yield group, read(f"{_SLICE}/{group}/{file}")
        except OSError as error:
            if error.errno not in _NO_GROUP:
                raise


def _process_facts() -> Facts:
    """Yield routing daemons, faultbed programs with the RDMA resources that they hold, and processes of faults."""
    running, stopped = dict.fromkeys(DAEMONS, 0), dict.fromkeys(DAEMONS, 0)
    programs: dict[int, str] = {}
    halted: list[str] = []
    ours: dict[str, int] = {}
    for pid in filter(str.isdecimal, os.listdir("/proc")):  # a Path for each takes three times as long
        with contextlib.suppress(OSError):
            # "pid (name) state ...": proc_pid_stat(5)
            name, _, rest = read(f"/proc/{pid}/stat").partition("(")[2].rpartition(")")
            if name in running:
                (stopped if rest.split()[0] == "T" else running)[name] += 1
            elif name.startswith("python") and (program := program_of(read(f"/proc/{pid}/cmdline"))):
                programs[int(pid)] = program
                halted += [program] if rest.split()[0] == "T" else []
            elif name.startswith(_NAMED):
                ours[name] = ours.get(name, 0) + 1
    for program in sorted({*programs.values()}):
        yield f"program {program}", f"{[*programs.values()].count(program)} running"
    for program in sorted({*halted}):
        yield f"stopped {program}", f"{halted.count(program)} stopped"
    for name, count in ours.items():
        yield f"process {name}", f"{count} running"
    yield from settings.resource_facts(programs)
    for name, count in running.items():
        yield f"daemon {name}", f"{count} running" + (f", {stopped[name]} stopped" if stopped[name] else "")


def program_of(command: str) -> str | None:
    """Return the module of a faultbed program, or `-c` for any Python program that was started with `-c`.

    Returns None for other programs, for the watcher, and for the process that node programs are forked from.
    """
    words = command.split("\0")
    if "-c" in words[:4]:
        return "-c"
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    return module if module.startswith(_OURS) and module not in _UNCOUNTED else None


def _unit_facts() -> Facts:
    try:
        for name, active, sub in systemd_units.list_units(_UNITS, within_s=_UNITS_S):
            yield f"unit {name}", f"{active} {sub}"
    except OSError as error:
        yield "units", f"{settings.UNKNOWN}: {error}"


def gathered(facts: Facts) -> dict[str, str]:
    """Return text by subject; several texts of one subject are joined."""
    texts_of: dict[str, list[str]] = {}
    for subject, text in facts:
        texts_of.setdefault(subject, []).append(text)
    return {subject: " and ".join(sorted(texts)) for subject, texts in texts_of.items()}


def read_nodes(nodes: dict[str, str | None]) -> dict[str, dict[str, str]]:
    """Return the state of nodes, by node and subject; `nodes` maps each to its namespace (None: the machine itself).

    Raises:
        OSError: a namespace is gone.
    """
    state: dict[str, dict[str, str]] = {}
    for node, namespace in nodes.items():
        netns.enter(namespace)
        try:
            facts = itertools.chain(network_facts(), settings.frr_facts(namespace))
            if namespace is None:
                facts = itertools.chain(facts, _machine_facts(), _unit_facts() if _has_systemd() else ())
            state[node] = gathered(facts)
        finally:
            netns.enter(None)
    return state


def _has_systemd() -> bool:
    return os.path.isdir("/run/systemd/system")
