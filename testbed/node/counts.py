"""Counters of a machine and of every switch on it.

    {"rxe0.out_of_seq_request": 0, "be0.carrier_changes": 2, "be0.queue_drops": 0, "gpu0.nr_throttled": 0, ...}

Names that end in a word of `faultbed.testbed.observe.counters.STATES` are states, not counters: the same reading shows
them. `read` returns everything. `sample` returns only what moves with traffic, by the cheapest calls that exist,
because it runs ten times a second beside the traffic that it watches.

It also runs on SONiC switches, whose Python is 3.9 up to release 202311 (sonic-buildimage, slave.mk: bullseye). So does
all code of `faultbed.testbed.node` and `faultbed.inject.node` that a switch uses: it must not need a later Python.

Formats: linux/rtnetlink.h, linux/if_link.h, linux/pkt_sched.h, linux/gen_stats.h.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import socket
import struct
import time
import zlib

from faultbed.testbed.node import netns
from faultbed.testbed.node.asic_ports import port_counts
from faultbed.testbed.node.gpu import health, nvml
from faultbed.testbed.node.gpu.xid import XidLog
from faultbed.testbed.node.netlink import RTA_MULTIPATH, attributes, next_hops
from faultbed.testbed.node.phy_counters import phy_counts
from faultbed.testbed.node.rdma import Rdma
from faultbed.testbed.node.routing.owned_numbers import STEER_PRIORITY

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Iterator

    Counts = Iterator[tuple[str, int]]

__all__ = [
    "Place",
    "cpu_waits",
    "gpu_counts",
    "is_full",
    "link_counts",
    "next_hops_of",
    "priority_of",
    "protocol_counts",
    "queue_stats_at",
    "soft_gpus",
    "stepped_s",
    "watch_clock",
]

_GETLINK, _GETADDR, _GETROUTE, _GETRULE, _GETQDISC, _GETSTATS = 18, 22, 26, 34, 38, 94
_FRA_PRIORITY = 6
# RTNH_F_DEAD | RTNH_F_LINKDOWN
_UNUSABLE = 1 | 16
_ROOT = 0xFFFFFFFF
_UP = 1
_LINK, _STATS_MSG, _TC_MSG = struct.Struct("=BxHiII"), struct.Struct("=BxHII"), struct.Struct("=BxxxiIII")
_TCA_STATS = (3).to_bytes(2, "little")
_STATS64 = struct.Struct("=8Q")
_STATS_NAMES = ("rx_packets", "tx_packets", "rx_bytes", "tx_bytes", None, None, "rx_dropped", "tx_dropped")
_LINK_NUMBERS = {4: "mtu", 33: "carrier", 35: "carrier_changes", 47: "carrier_up_count", 48: "carrier_down_count"}
_IP = frozenset({"InCEPkts", "InECT1Pkts", "InDelivers", "InNoRoutes", "FragFails", "OutRequests"})
_IP6 = frozenset({"Ip6InDelivers", "Ip6OutRequests"})
"""IPv6 packets of a switch's own, where BGP runs over link-local addresses (RFC 4293)."""
_TCP = frozenset({"ActiveOpens", "PassiveOpens", "EstabResets", "RetransSegs"})
"""Counters of the IP and TCP layers that are kept (RFC 4293, RFC 4022, the kernel's IpExt): one set per namespace."""


def _boot_id() -> str:
    """Return the id of this boot (Documentation/admin-guide/sysctl/kernel.rst); empty where the kernel gives none."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
    return ""


def _ahead_s() -> float:
    """Return the seconds from uptime to wall clock; only setting the wall clock changes them."""
    return time.clock_gettime(time.CLOCK_REALTIME) - time.clock_gettime(time.CLOCK_BOOTTIME)


_FULL = 0.002
"""A file system counts as full if less than this fraction of its blocks is available to users."""

_HOG = "faultbed-hog"
"""The name of the busy processes of faults (`faultbed.inject.node.machine.hog`)."""

_SLICE = "/sys/fs/cgroup/faultbed.slice"

_ENGINE = b"faultbed.traffic.node.engine"
"""An argument of the command line of a host's traffic process."""


class Place:
    """A machine (`namespace` None), or a switch in a namespace of it, with its open sockets and files."""

    def __init__(self, namespace: str | None) -> None:
        self.namespace = namespace
        self._route = netns.open_route(namespace)
        netns.enter(None)
        self._born = netns.identity(namespace)
        self._boot = zlib.crc32(f"{_boot_id()}/{self._born}".encode())
        self._names: dict[int, str] = {}
        self._seen: dict[object, bytes] = {}
        self._stats_at: dict[int, int] = {}
        self._rdma = Rdma() if namespace is None else None
        self._gpus = _Gpus() if namespace is None else None
        self._xids = XidLog() if namespace is None else None

    def is_stale(self) -> bool:
        """Return whether the namespace was replaced by a new one of the same name."""
        return self._born != netns.identity(self.namespace)

    def read(self) -> dict[str, int]:
        """Read every counter and state.

        Raises:
            OSError: the namespace is gone.
        """
        values: dict[str, int] = {"kernel.boot": self._boot}
        self._names.clear()
        for _, body in self._route.dump(_GETLINK, bytes(_LINK.size)):
            index, flags = struct.unpack_from("=iI", body, 4)
            inside = attributes(body[_LINK.size :])
            self._names[index] = name = inside[3].rstrip(b"\0").decode()
            values.update(link_counts(name, flags, inside))
        values.update(self._forwarding())
        values.update(self._queues())
        netns.enter(self.namespace)
        try:
            values.update(_protocols())
        finally:
            netns.enter(None)
        if self._rdma is not None:
            self._rdma.refresh()
            values.update(self._rdma.counts())
            values.update(self._rdma.ended())
            values.update(self._addresses())
        if self._gpus is not None:
            self._gpus.refresh()
            for name, text in self._gpus.texts():
                values.update(gpu_counts(name, text.decode()))
            values.update(_machine())
            values.update(port_counts())
            values.update(phy_counts())
        if self._xids is not None:
            values.update(_xids(self._xids))
        return values

    def sample(self) -> dict[str, int]:
        """Return the counters that have changed since the last sample.

        Raw answers are compared with the last ones, and decoded only if they differ.
        """
        if not self._names:
            self.read()
        values: dict[str, int] = {}
        # Dumps one attribute per link, IFLA_STATS_LINK_64, instead of all.
        for _, body in self._route.dump(_GETSTATS, _STATS_MSG.pack(0, 0, 0, 1)):
            index = struct.unpack_from("=I", body, 4)[0]
            if self._is_new(index, body) and index in self._names:
                values.update(_traffic(self._names[index], body, _STATS_MSG.size + 4))
        values.update(self._queues(only_new=True))
        if self._rdma is not None:
            values.update(self._rdma.moved())
        if self._gpus is not None:
            for name, text in self._gpus.texts():
                values.update(self._changed_gpu(name, text))
        return values

    def _changed_gpu(self, name: str, text: bytes) -> Counts:
        """Yield the counters of a soft GPU's cgroup and its synthetic registers, each only if it has changed."""
        if self._is_new(name, text):
            yield from gpu_counts(name, text.decode())
        if health.known() or ("health", name) in self._seen:
            registers = dict(_health(name))
            if self._is_new(("health", name), repr(registers).encode()):
                yield from registers.items()

    def _is_new(self, source: object, raw: bytes) -> bool:
        """Return whether a source's raw answer differs from its last one, and remember it."""
        if self._seen.get(source) == raw:
            return False
        self._seen[source] = raw
        return True

    def _addresses(self) -> Counts:
        """Yield how many IPv4 addresses each interface has."""
        counts = dict.fromkeys(self._names, 0)
        for _, body in self._route.dump(_GETADDR, bytes([socket.AF_INET]) + bytes(7)):
            (index,) = struct.unpack_from("=4xI", body)
            counts[index] = counts.get(index, 0) + 1
        yield from ((f"{name}.addresses", counts[index]) for index, name in self._names.items())

    def _queues(self, *, only_new: bool = False) -> Counts:
        for _, body in self._route.dump(_GETQDISC, bytes(_TC_MSG.size)):
            _family, index, _handle, parent, _info = _TC_MSG.unpack_from(body)
            if parent != _ROOT or index not in self._names:
                continue
            at = self._stats_at.get(index, 0)
            if not _is_queue_stats(body, at):  # a queue of another kind has other attributes before it
                at = self._stats_at[index] = queue_stats_at(body)
            # struct tc_stats: bytes, packets, drops, overlimits, bps, pps, qlen, backlog. Two of them are used.
            raw = body[at + 16 : at + 20] + body[at + 36 : at + 40]
            if at and (not only_new or self._is_new(("queue", index), raw)):
                drops, backlog = struct.unpack("=II", raw)
                yield f"{self._names[index]}.queue_drops", drops
                yield f"{self._names[index]}.queue_bytes", backlog

    def _forwarding(self) -> Counts:
        """Yield which ports share the load of a route, and whether the rule of `congestion.hash-collision` exists."""
        shared = {
            index
            for _, body in self._route.dump(_GETROUTE, bytes([socket.AF_INET]) + bytes(11))
            for index in next_hops_of(body)
        }
        for index, name in self._names.items():
            yield f"{name}.multipath", int(index in shared)
        rules = self._route.dump(_GETRULE, bytes([socket.AF_INET]) + bytes(11))
        yield "ip.steered", int(any(priority_of(body) == STEER_PRIORITY for _, body in rules))

    def close(self) -> None:
        """Close sockets and files."""
        self._route.close()
        for reader in (self._rdma, self._gpus, self._xids):
            if reader is not None:
                reader.close()


def _is_queue_stats(body: bytes, at: int) -> bool:
    return bool(at) and body[at + 2 : at + 4] == _TCA_STATS


def queue_stats_at(body: bytes) -> int:
    """Return the offset of the attribute TCA_STATS; 0: there is none."""
    at = _TC_MSG.size
    while at + 4 <= len(body):
        if _is_queue_stats(body, at):
            return at
        at += max(4, (int.from_bytes(body[at : at + 2], "little") + 3) & ~3)
    return 0


def next_hops_of(route: bytes) -> list[int]:
    """Return the interfaces among which a route spreads its packets, from an RTM_NEWROUTE body.

    A route with a single next hop spreads nothing: its list is empty. Unreachable next hops (RTNH_F_DEAD,
    RTNH_F_LINKDOWN) get no packets and are left out.
    """
    hops = next_hops(attributes(route[12:]).get(RTA_MULTIPATH, b""))
    return [index for flags, index, _weight, _ in hops if not flags & _UNUSABLE]


def priority_of(rule: bytes) -> int:
    """Return the priority of a policy rule, from an RTM_NEWRULE body (linux/fib_rules.h)."""
    return int.from_bytes(attributes(rule[12:]).get(_FRA_PRIORITY, b""), "little")


def link_counts(name: str, flags: int, inside: dict[int, bytes]) -> Counts:
    """Yield an interface's counters and states, from its flags and the attributes of RTM_NEWLINK."""
    yield f"{name}.up", flags & _UP
    for kind, counter in _LINK_NUMBERS.items():
        # The carrier of an interface that is down is undefined; sysfs does not return it either.
        if kind in inside and (counter != "carrier" or flags & _UP):
            yield f"{name}.{counter}", int.from_bytes(inside[kind], "little")
    if 23 in inside:  # noqa: PLR2004 (IFLA_STATS64)
        yield from _traffic(name, inside[23], 0)


def _traffic(name: str, body: bytes, at: int) -> Counts:
    for counter, value in zip(_STATS_NAMES, _STATS64.unpack_from(body, at)):  # noqa: B905 - Python 3.9
        if counter is not None:
            yield f"{name}.{counter}", value


class _Gpus:
    """Counters of soft GPUs' cgroups: one file each, kept open, because opening costs more than reading."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}

    def refresh(self) -> None:
        """Find the soft GPUs that exist now."""
        self.close()
        for path in glob.glob(f"{_SLICE}/*.service/cpu.stat"):
            self._open[_unit(path)] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def texts(self) -> Iterator[tuple[str, bytes]]:
        """Yield each GPU's name and the content of its file."""
        for name, file in self._open.items():
            with contextlib.suppress(OSError):  # it is gone by now
                yield name, os.pread(file, 4096, 0)

    def close(self) -> None:
        for file in self._open.values():
            os.close(file)
        self._open.clear()


def soft_gpus() -> list[str]:
    """Return the names of the soft GPUs that run."""
    return [_unit(f"{folder}/") for folder in glob.glob(f"{_SLICE}/*.service")]


def _unit(path: str) -> str:
    return path.split("/")[-2].removeprefix("faultbed-").removesuffix(".service")


def gpu_counts(name: str, stat: str) -> Counts:
    """Parse a cgroup's cpu.stat (Documentation/admin-guide/cgroup-v2.rst)."""
    for line in stat.splitlines():
        counter, value = line.split()
        yield f"{name}.{counter}", int(value)


def _protocols() -> Counts:
    """Read the IP and TCP counters of the namespace that this process is in."""
    for path in ("/proc/net/snmp", "/proc/net/netstat"):
        with contextlib.suppress(FileNotFoundError), open(path, encoding="ascii") as file:
            yield from protocol_counts(file.read())
    with contextlib.suppress(FileNotFoundError), open("/proc/net/snmp6", encoding="ascii") as file:
        yield from (
            (f"ip6.{name.removeprefix('Ip6')}", int(value)) for name, value in map(str.split, file) if name in _IP6
        )
    with contextlib.suppress(OSError), open("/proc/sys/net/ipv4/fib_multipath_hash_policy", encoding="ascii") as file:
        yield "ip.hash_policy", int(file.read())


def protocol_counts(text: str) -> Counts:
    """Parse /proc/net/snmp or netstat, which have names in one line and values in the next."""
    lines = [line.split() for line in text.splitlines()]
    for names, values in zip(lines[::2], lines[1::2]):  # noqa: B905 - Python 3.9 has no strict
        kept, layer = {"Ip:": (_IP, "ip"), "IpExt:": (_IP, "ip"), "Tcp:": (_TCP, "tcp")}.get(names[0], ((), ""))
        yield from ((f"{layer}.{name}", int(value)) for name, value in zip(names, values) if name in kept)  # noqa: B905


def _machine() -> Counts:
    # A kernel without CONFIG_SCHEDSTATS has no such file.
    with contextlib.suppress(FileNotFoundError), open("/proc/schedstat", encoding="ascii") as file:
        yield from cpu_waits(file.read())
    # Documentation/accounting/psi.rst; a kernel may be started without it.
    with contextlib.suppress(OSError), open("/proc/pressure/memory", encoding="ascii") as file:
        yield "memory.stalled_us", int(file.readline().rpartition("total=")[2])
    yield "clock.stepped", stepped_s()
    yield "disk.full", int(is_full("/var/lib"))
    stopped = busy = engines = 0
    for path in glob.glob("/proc/[0-9]*/stat"):
        name, state = _process(path)
        stopped += state == "T"
        busy += name == _HOG
        engines += name.startswith("python") and _ENGINE in _arguments(path)
    yield "processes.stopped", stopped
    yield "hogs.running", busy
    yield "engines.running", engines
    for folder in glob.glob(f"{_SLICE}/*.service"):
        with contextlib.suppress(OSError):  # it has ended by now
            yield from _limits(folder)
            yield from _health(_unit(f"{folder}/"))
    yield from nvml.counts(_is_hog if busy else None)


def _xids(log: XidLog) -> Counts:
    """Count the XID events of each GPU; 0 for a soft GPU without one."""
    events = log.counts()
    for gpu in {*soft_gpus()} | events.keys():
        yield f"{gpu}.xids", events[gpu]


def _health(gpu: str) -> Counts:
    """Yield the health registers of a soft GPU, by NVML's names."""
    return ((f"{gpu}.{name}", value) for name, value in health.Health(gpu).counts().items())


def _is_hog(pid: str) -> bool:
    return pid.isdigit() and _process(f"/proc/{pid}/stat")[0] == _HOG


def _limits(folder: str) -> Counts:
    name = _unit(f"{folder}/cpu.max")
    with open(f"{folder}/cpu.max", encoding="ascii") as file:
        quota = file.read().split()[0]
    yield f"{name}.quota_us", -1 if quota == "max" else int(quota)
    with open(f"{folder}/cgroup.procs", encoding="ascii") as file:
        first = file.readline().strip()
    if first:
        with open(f"/proc/{first}/schedstat", encoding="ascii") as file:
            yield f"{name}.wait_us", int(file.read().split()[1]) // 1000


@functools.cache
def watch_clock() -> float:
    """Begin to watch the wall clock, for `stepped_s`, when first called. Return the offset at that moment."""
    return _ahead_s()


def stepped_s() -> int:
    """Return by how many seconds the wall clock was stepped since this process began to watch it."""
    return round(_ahead_s() - watch_clock())


def cpu_waits(text: str) -> Counts:
    """Parse /proc/schedstat: the waiting time of tasks for each CPU, in µs (field 8, in ns; sched-stats.rst)."""
    for line in text.splitlines():
        if line.startswith("cpu"):
            cpu, *fields = line.split()
            yield f"{cpu}.wait_us", int(fields[7]) // 1000


def is_full(path: str) -> bool:
    """Return whether the file system of `path` is full for all users but root."""
    usage = os.statvfs(path)
    return usage.f_bavail < usage.f_blocks * _FULL


def _arguments(path: str) -> list[bytes]:
    """Return the command line of the process that a /proc path belongs to; empty if it has ended."""
    try:
        with open(f"{path.rpartition('/')[0]}/cmdline", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def _process(path: str) -> tuple[str, str]:
    """Return name and state of "pid (name) state ..." (proc_pid_stat(5)); empty if the process is gone."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            head, _, rest = file.read().rpartition(")")
            return head.partition("(")[2], rest.split()[0]
    except OSError:
        return "", ""
