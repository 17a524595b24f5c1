"""Counters of a lab: one cheap command a machine, all machines at once.

    read(lab) -> {"host1": {"rxe0.out_of_seq_request": 0, "be0.carrier_changes": 2, "gpu0.nr_throttled": 0, ...},
                  "rtsw1": {"ctsw1.carrier_down_count": 1, "ctsw1.tx_bytes": 12345, ...}}

No Python runs on the node: `grep` over sysfs costs milliseconds where an interpreter costs a second under emulation.
What `STATES` names are states, not counters; they are here because the same command reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from testbed.errors import LabError

if TYPE_CHECKING:
    from testbed.lab import Lab

__all__ = ["STATES", "Snapshot", "delta", "flat_deltas", "parse", "read", "script"]

Snapshot = Mapping[str, Mapping[str, int]]
"""Counter values by node and name."""

STATES = frozenset({"carrier", "up", "quota_us", "mtu", "hash_policy", "stopped"})
"""Last parts of names that are states: 0 or 1, a setting, or a limit (`quota_us` is -1 for no limit)."""

_NET = (
    "carrier carrier_changes carrier_up_count carrier_down_count flags mtu statistics/rx_bytes statistics/tx_bytes "
    "statistics/rx_packets statistics/tx_packets statistics/rx_dropped statistics/tx_dropped"
)
_IP = frozenset({"InCEPkts", "InECT1Pkts", "InNoRoutes", "FragFails"})
_TCP = frozenset({"ActiveOpens", "PassiveOpens", "EstabResets", "RetransSegs"})
"""What is kept of the IP and TCP layers (RFC 4293, RFC 4022, the kernel's IpExt): a namespace has its own."""

_MARK = "@@node"


def read(lab: Lab, nodes: Iterable[str] | None = None, *, timeout_s: float = 60.0) -> dict[str, dict[str, int]]:
    """Read the counters of some nodes (default: every host and switch of the lab).

    Raises:
        Unreachable: a machine does not answer.
        CommandFailed: it did not answer in time.
    """
    hosts, switches = lab.topology.host_by_name, lab.topology.switch_by_name
    wanted = tuple(dict.fromkeys(nodes)) if nodes is not None else (*hosts, *switches)
    by_machine: dict[str, list[tuple[str, str | None]]] = {}
    for name in wanted:
        if name not in hosts and name not in switches:
            raise LabError(f"no node {name} in lab {lab.name}: counters are of {', '.join([*hosts, *switches])}")
        machine = lab.carrier(name)
        by_machine.setdefault(machine.name, []).append((name, lab.netns(name)))

    def one(machine: str) -> dict[str, dict[str, int]]:
        parts = by_machine[machine]
        done = lab.carrier(parts[0][0]).run(["sh", "-c", script(parts)], timeout_s=timeout_s, check=False)
        return parse(done.stdout)

    with ThreadPoolExecutor(max_workers=max(1, len(by_machine))) as pool:
        found = {name: values for part in pool.map(one, by_machine) for name, values in part.items()}
    return {name: found.get(name, {}) for name in wanted}


def script(parts: Iterable[tuple[str, str | None]]) -> str:
    """The shell that prints the counters of nodes on one machine: (name, its network namespace or None)."""
    lines = []
    for name, netns in parts:
        # `ip netns exec` mounts the namespace's own /sys; a bare setns would show the machine's.
        files = " ".join(f"/sys/class/net/*/{file}" for file in _NET.split())
        grep = (
            f"grep -H . {files} /proc/sys/net/ipv4/fib_multipath_hash_policy 2>/dev/null; "
            'grep -HE "^(Ip|IpExt|Tcp):" /proc/net/snmp /proc/net/netstat'
        )
        if netns is None:
            lines += [
                f"echo {_MARK} {name}",
                grep,
                "grep -H . /sys/class/infiniband/*/ports/1/hw_counters/* 2>/dev/null",
                'grep -H "^cpu[0-9]" /proc/schedstat',
                "echo ranks.stopped:$(grep -hs '^State:.T' /proc/[0-9]*/status | wc -l)",
                "cd /sys/fs/cgroup/faultbed.slice 2>/dev/null && grep -H . */cpu.stat */cpu.max 2>/dev/null",
                'for g in *.service; do read p <$g/cgroup.procs && echo "$g/schedstat:$(cat /proc/$p/schedstat)"; done',
            ]
        else:
            lines += [f"echo {_MARK} {name}", f"ip netns exec {netns} sh -c '{grep}'"]
    return "\n".join([*lines, "true"])


def parse(text: str) -> dict[str, dict[str, int]]:
    """What `script` printed, by node and name."""
    nodes: dict[str, dict[str, int]] = {}
    current: dict[str, int] = {}
    header: list[str] = []
    for line in text.splitlines():
        if line.startswith(_MARK):
            current = nodes.setdefault(line.split()[1], {})
            continue
        path, _, value = line.partition(":")
        if path.startswith("/proc/net/"):
            # Names in one line, values in the next.
            words = value.split()
            if header[:1] == words[:1]:
                current.update(_protocol(header, words))
                words = []
            header = words
            continue
        name = _name(path, value)
        if name is not None:
            current[name[0]] = name[1]
    return nodes


def _protocol(names: list[str], values: list[str]) -> dict[str, int]:
    layer, kept = ("tcp", _TCP) if names[0] == "Tcp:" else ("ip", _IP)
    return {f"{layer}.{name}": int(value) for name, value in zip(names, values, strict=False) if name in kept}


def _name(path: str, value: str) -> tuple[str, int] | None:
    for pattern, named in _FILES:
        if match := re.fullmatch(pattern, path):
            return named(match, value)
    return None


def _interface(match: re.Match[str], value: str) -> tuple[str, int]:
    device, name = match.groups()
    return (f"{device}.up", int(value, 16) & 1) if name == "flags" else (f"{device}.{name}", int(value))


def _rnic(match: re.Match[str], value: str) -> tuple[str, int] | None:
    return (f"{match[1]}.{match[2]}", int(value)) if match[2] != "lifespan" else None


def _cpu(_match: re.Match[str], value: str) -> tuple[str, int]:
    # Documentation/scheduler/sched-stats.rst: the eighth is the time that tasks have waited to run, in ns.
    cpu, *fields = value.split()
    return f"{cpu}.wait_us", int(fields[7]) // 1000


def _gpu(match: re.Match[str], value: str) -> tuple[str, int]:
    first, second, *_ = value.split()
    if match[2] == "cpu.max":
        return f"{match[1]}.quota_us", -1 if first == "max" else int(first)
    if match[2] == "schedstat":
        return f"{match[1]}.wait_us", int(second) // 1000
    return f"{match[1]}.{first}", int(second)


_FILES: tuple[tuple[str, Callable[[re.Match[str], str], tuple[str, int] | None]], ...] = (
    (r"/sys/class/net/([^/]+)/(?:statistics/)?(\w+)", _interface),
    (r"/sys/class/infiniband/([^/]+)/ports/1/hw_counters/(\w+)", _rnic),
    (r"/proc/sys/net/ipv4/fib_multipath_hash_policy", lambda _, value: ("ip.hash_policy", int(value))),
    (r"/proc/schedstat", _cpu),
    (r"ranks\.stopped", lambda _, value: ("ranks.stopped", int(value))),
    (r"(?:faultbed-)?([^/]+)\.service/(cpu\.stat|cpu\.max|schedstat)", _gpu),
)


def delta(before: int, after: int) -> int:
    """How far a counter has come. One that stands lower than before was reset (reboot, module reload): count from 0."""
    return after - before if after >= before else after


def flat_deltas(before: Snapshot, after: Snapshot) -> dict[str, int]:
    """Increments as `node/name`, for counters that are in both (or appeared since, counted from 0), without states."""
    return {
        f"{node}/{name}": delta(before.get(node, {}).get(name, 0), value)
        for node, values in after.items()
        for name, value in values.items()
        if name.rsplit(".", 1)[-1] not in STATES
    }
