"""The state of a lab in every respect that a fault could change: captured before and after, and compared.

Each machine's watcher reports it (`faultbed.testbed.node.state`, `faultbed.testbed.node.settings`). A fingerprint
contains states, never counters: links (flags, MTU, qdisc; whether they forward IPv4 and check sources), addresses,
routes, learnt path MTUs, rules, qdiscs, filters, configured neighbours, nftables by content, DCB, ethtool and DCQCN
settings of hardware, RDMA links, GIDs, types of service, queue pairs and memory regions of faultbed programs,
provisioned sysctls, `cpu.max`, processes in faultbed's cgroups, GPU clocks, power and modes, faultbed's units,
processes and stored reverts (those beside QEMU under the node `controller`), routing daemons and their configuration.

On a rack with other users, only what is reserved for this command is captured (`Lab.reserved`): a whole host or switch
except the routes that it learns, which other users' faults change; for a link, the interfaces at its ends, and units
and stored reverts of faults on it. Other users' changes do not make this lab DIRTY, and a host that they reboot does
not delay this command.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from faultbed.testbed.model.fault_names import is_fault_on, targets_on
from faultbed.testbed.node.settings import UNKNOWN
from faultbed.testbed.node.state import ROUTE_SETTINGS
from faultbed.testbed.side_by_side import on_each
from faultbed.testbed.stopping import Deadline
from faultbed.testbed.tenancy.reservation import WHOLE_LAB

if TYPE_CHECKING:
    from pathlib import Path

    from faultbed.testbed.lab import Lab
    from faultbed.testbed.model.topology import Topology

__all__ = [
    "CONTROLLER",
    "SETTLE_S",
    "Fingerprint",
    "capture",
    "diff",
    "part",
    "settle",
    "stored_reverts",
    "unknown",
    "wait_for_quiet",
]

SETTLE_S = 30.0
"""How long `settle` waits for routing to recover. BGP with timers of 1 and 3 s is faster, even on a starved machine."""
QUIET_S = 2.0
"""How long a lab must be as it was before, at `LOOKS` looks or more: an optic or a session that flaps is up at some."""
MOVING_S = 5.0
"""`QUIET_S` of a lab that differed at an earlier look. Longer than the timers of BGP, 1 and 3 s."""
LOOKS = 3
"""How many looks without a difference there must be at least."""
_INTERVAL_S = 0.5
CONTROLLER = "controller"
"""The node name of the stored reverts on this machine."""
_OF_INTERFACES = {"link", "inet", "address", "qdisc", "filter", "neighbour", "dcb", "ethtool", "ecn"}
_OF_RDMA = {"rdma", "gid", "roce"}
_OF_FAULTS = {"revert", "unit"}
_LEARNT = {"bgp", "zebra"}
"""Protocols of routes that a node learns from others."""
_MAY_END = ("program ", "rdma resources ")
"""Subjects that may become fewer without being a difference."""
_OF_TRAFFIC = ("program faultbed.traffic.", "rdma resources ")
"""Subjects that another command's traffic adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """State by node and subject, `{"rtsw1": {"link ctsw1": "UP mtu 4200 ..."}}`, of the reserved part `covers`."""

    nodes: Mapping[str, Mapping[str, str]]
    covers: tuple[str, ...] = (WHOLE_LAB,)

    def to_json(self) -> dict[str, dict[str, str]]:
        """Return plain data, sorted."""
        return {name: dict(sorted(facts.items())) for name, facts in sorted(self.nodes.items())}


def capture(lab: Lab, *, timeout_s: float = 90.0) -> Fingerprint:
    """Capture the fingerprint of the reserved machines of a lab, and of the switches on them.

    Raises:
        Unreachable: a machine does not answer, so that its state is unknown.
        CommandFailed: a machine could not report it, or not in time.
    """
    covers = lab.reserved
    at = None if WHOLE_LAB in covers else _nodes(lab.topology, covers)
    machines = tuple(name for name in lab.nodes() if at is None or name in at)
    carried = lab.carried((*machines, *(name for name in lab.topology.switch_by_name if lab.netns(name))))

    def capture_machine(machine: str) -> dict[str, dict[str, str]]:
        nodes: dict[str, dict[str, str]] = lab.request(
            machine, {"do": "state", "nodes": carried[machine]}, timeout_s=timeout_s
        )["nodes"]
        return nodes

    answers = on_each(machines, capture_machine, timeout_s=2 * timeout_s)
    state = {name: facts for answer in answers for name, facts in answer.items()}
    if reverts := {f"revert {path.stem}": "there" for path in stored_reverts(lab.state_dir).glob("*.revert")}:
        state[CONTROLLER] = reverts
    return Fingerprint(nodes=part(state, lab.topology, covers), covers=covers)


def stored_reverts(state_dir: Path) -> Path:
    """Return the folder with the reverts of faults beside QEMU while these are in place."""
    return state_dir / "faults"


def part(
    nodes: Mapping[str, Mapping[str, str]], topology: Topology, covers: Collection[str]
) -> Mapping[str, Mapping[str, str]]:
    """Return the part of a lab's state that belongs to hosts, switches and links of these names. Pure."""
    if WHOLE_LAB in covers:
        return nodes
    ends = _nodes(topology, covers)
    targets = [target for link in topology.links if link.name in covers for target in targets_on(link)]

    def belongs(node: str, subject: str) -> bool:
        if node in covers:
            return not _is_learnt(subject)
        return _of_ends(subject, ends[node]) or _of_fault(subject, targets)

    return {
        node: {subject: text for subject, text in facts.items() if belongs(node, subject)}
        for node, facts in nodes.items()
        if node in ends
    }


def _nodes(topology: Topology, covers: Collection[str]) -> dict[str, set[str]]:
    """Return the nodes of these names, and the interfaces and RDMA devices at the ends of the links among them."""
    ends: dict[str, set[str]] = {name: set() for name in covers if ":" not in name}
    for link in topology.links:
        if link.name in covers:
            for port in (link.a, link.b):
                ends.setdefault(port.node, set()).add(port.netdev)
            ends[link.b.node] |= {link.rnic} if link.rnic else set()
    return ends


def _is_learnt(subject: str) -> bool:
    return subject.removeprefix(ROUTE_SETTINGS).startswith("route ") and subject.rpartition(" ")[2] in _LEARNT


def _of_fault(subject: str, targets: Collection[str]) -> bool:
    """Return whether a subject is a unit or a stored revert of a fault on one of these targets."""
    kind, _, name = subject.partition(" ")
    return kind in _OF_FAULTS and is_fault_on(name, targets)


def _of_ends(subject: str, ends: Collection[str]) -> bool:
    """Return whether a subject belongs to one of these interfaces or RDMA devices."""
    kind, _, rest = subject.partition(" ")
    named = rest.partition("/" if kind in _OF_RDMA else " ")[0]
    return kind in _OF_INTERFACES | _OF_RDMA and named in ends


def diff(before: Fingerprint, after: Fingerprint) -> list[str]:
    """Return every difference as a readable line; empty if there is none.

    A program that has ended is not a difference: a user's traffic may end before a fault that began during it. A fact
    that could not be read now always is one, even if it could not be read before.
    """
    return [line for _, _, line in _differences(before, after)]


def _differences(before: Fingerprint, after: Fingerprint) -> Iterator[tuple[str, str, str]]:
    """Yield the node, the subject and the line of every difference."""
    for node in sorted({*before.nodes, *after.nodes}):
        was, now = before.nodes.get(node, {}), after.nodes.get(node, {})
        for subject in sorted({*was, *now}):
            if subject.startswith(_MAY_END) and _total(now, subject) <= _total(was, subject):
                continue
            if now.get(subject, "").startswith(UNKNOWN):
                yield node, subject, f"{node}: {subject} is {now[subject]}"
            elif subject not in now:
                yield node, subject, f"{node}: {subject} is gone (was {was[subject]})"
            elif subject not in was:
                yield node, subject, f"{node}: {subject} is new ({now[subject]})"
            elif was[subject] != now[subject]:
                yield node, subject, f"{node}: {subject} was {was[subject]}, is {now[subject]}"


def unknown(fingerprint: Fingerprint) -> list[str]:
    """Return each fact that could not be read, as a readable line."""
    return [
        f"{node}: {subject} is {text}"
        for node, facts in sorted(fingerprint.nodes.items())
        for subject, text in sorted(facts.items())
        if text.startswith(UNKNOWN)
    ]


def _total(facts: Mapping[str, str], subject: str) -> int:
    """Return the sum of the numbers of a fact such as `2 running` or `3 mr, 2 qp`."""
    return sum(int(part.split()[0]) for part in facts.get(subject, "0").split(", "))


def settle(lab: Lab, before: Fingerprint, *, within_s: float | None = None) -> list[str]:
    """Wait for routing to recover, and return the differences of a lab to an earlier fingerprint.

    Traffic that another command has begun meanwhile, and that still runs, is not a difference.

    Args:
        lab: the lab.
        before: its earlier state.
        within_s: how long routing may take to recover; `SETTLE_S` by default.
    """
    lab.reserved = before.covers
    return wait_for_quiet(lambda: _left(lab, before), within_s=SETTLE_S if within_s is None else within_s)


def wait_for_quiet(differences: Callable[[], list[str]], *, within_s: float) -> list[str]:
    """Look until a lab has been without differences for `QUIET_S`, and return those that are left.

    One look without a difference is not enough: a link that flaps is up at some looks. A lab that has differed must be
    quiet for `MOVING_S`. After `within_s`, or once the command was requested to stop, the next look with a difference
    ends the wait.

    Args:
        differences: looks once; empty: the lab is as it was before.
        within_s: how long the lab may differ.
    """
    deadline, looks, quiet_s, quiet_since_s = Deadline(within_s), 0, QUIET_S, 0.0
    while True:
        looked_s = time.monotonic()
        if left := differences():
            looks, quiet_s = 0, MOVING_S
            if deadline.is_over:
                return left
        else:
            looks += 1
            quiet_since_s = looked_s if looks == 1 else quiet_since_s
            if looked_s - quiet_since_s >= quiet_s and looks >= LOOKS:
                return []
        time.sleep(_INTERVAL_S)


def _left(lab: Lab, before: Fingerprint) -> list[str]:
    differences = list(_differences(before, capture(lab)))
    if not any(subject.startswith(_OF_TRAFFIC) for _, subject, _ in differences):
        return [line for _, _, line in differences]
    # Read after the capture: if that command has ended since, its traffic is a difference, and `settle` captures again.
    reserved_by_others = lab.held_by_others()
    return [
        line
        for node, subject, line in differences
        if not (subject.startswith(_OF_TRAFFIC) and (node in reserved_by_others or WHOLE_LAB in reserved_by_others))
    ]
