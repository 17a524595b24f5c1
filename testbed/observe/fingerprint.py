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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

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
    "OF_TRAFFIC",
    "SETTLE_S",
    "Fingerprint",
    "Look",
    "capture",
    "diff",
    "differences",
    "interface_of",
    "look_of",
    "part",
    "settle",
    "stored_reverts",
    "unknown",
    "wait_for_quiet",
]

SETTLE_S = 30.0
"""How long `settle` waits for routing to recover. BGP with timers of 1 and 3 s is faster, even on a starved machine."""
QUIET_S = 2.0
"""How long nothing that the kernels report may have changed: an optic or a session that flaps is up at some looks."""
MOVING_S = 5.0
"""`QUIET_S` of a lab that differed at an earlier look. Longer than the timers of BGP, 1 and 3 s."""
_INTERVAL_S = 0.5
_Known = TypeVar("_Known")
"""What is known of a subject: its state, or when it changed."""
CONTROLLER = "controller"
"""The node name of the stored reverts on this machine."""
_OF_INTERFACES = {"link", "inet", "address", "qdisc", "filter", "neighbour", "dcb", "ethtool", "ecn"}
_OF_RDMA = {"rdma", "gid", "roce"}
_OF_FAULTS = {"revert", "unit"}
_LEARNT = {"bgp", "zebra"}
"""Protocols of routes that a node learns from others."""
_MAY_END = ("program ", "rdma resources ")
"""Subjects that may become fewer without being a difference."""
OF_TRAFFIC = ("program faultbed.traffic.", "rdma resources ")
"""Subjects that another command's traffic adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """State by node and subject, `{"rtsw1": {"link ctsw1": "UP mtu 4200 ..."}}`, of the reserved part `covers`.

    `moved` has the seconds since the kernel reported a change of a subject, by node and subject, for what
    `faultbed.testbed.node.watch` listens to; all those of the last `heard_s` seconds are known.
    """

    nodes: Mapping[str, Mapping[str, str]]
    covers: tuple[str, ...] = (WHOLE_LAB,)
    moved: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    heard_s: float = 0.0

    @property
    def still_s(self) -> float:
        """Seconds for which nothing is known to have changed."""
        return min((self.heard_s, *(ago_s for subjects in self.moved.values() for ago_s in subjects.values())))

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

    def capture_machine(machine: str) -> Mapping[str, Any]:
        return lab.request(machine, {"do": "state", "nodes": carried[machine]}, timeout_s=timeout_s)

    answers = on_each(machines, capture_machine, timeout_s=2 * timeout_s)
    state = {name: facts for answer in answers for name, facts in answer["nodes"].items()}
    moved = {name: subjects for answer in answers for name, subjects in answer["moved"].items()}
    if reverts := {f"revert {path.stem}": "there" for path in stored_reverts(lab.state_dir).glob("*.revert")}:
        state[CONTROLLER] = reverts
    return Fingerprint(
        nodes=part(state, lab.topology, covers),
        covers=covers,
        moved=part(moved, lab.topology, covers),
        heard_s=min((answer["heard_s"] for answer in answers), default=0.0),
    )


def stored_reverts(state_dir: Path) -> Path:
    """Return the folder with the reverts of faults beside QEMU while these are in place."""
    return state_dir / "faults"


def part(
    nodes: Mapping[str, Mapping[str, _Known]], topology: Topology, covers: Collection[str]
) -> Mapping[str, Mapping[str, _Known]]:
    """Return the part of what is known by node and subject that belongs to these hosts, switches and links. Pure."""
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
    return interface_of(subject) in ends


def interface_of(subject: str) -> str:
    """Return the interface or RDMA device that a subject belongs to, such as `ctsw1` for `link ctsw1`; empty: none."""
    kind, _, rest = subject.partition(" ")
    return rest.partition("/" if kind in _OF_RDMA else " ")[0] if kind in _OF_INTERFACES | _OF_RDMA else ""


def diff(before: Fingerprint, after: Fingerprint) -> list[str]:
    """Return every difference as a readable line; empty if there is none.

    A program that has ended is not a difference: a user's traffic may end before a fault that began during it. A fact
    that could not be read now always is one, even if it could not be read before.
    """
    return [line for _, _, line in differences(before, after)]


def differences(before: Fingerprint, after: Fingerprint) -> Iterator[tuple[str, str, str]]:
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
    return wait_for_quiet(lambda: _look(lab, before), within_s=SETTLE_S if within_s is None else within_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one look at a lab has shown.

    Attributes:
        left: a line for each difference to its state before.
        still_s: for how many seconds nothing is known to have changed (`Fingerprint.still_s`).
        moving: a line for each subject that has changed lately.
    """

    left: list[str]
    still_s: float
    moving: list[str]


def look_of(left: list[str], now: Fingerprint) -> Look:
    """Return a look, from the differences that count and the fingerprint in which they were found."""
    moving = [
        f"{node}: {subject} does not stay as it was: it changed {ago_s:.1f} s before the last look"
        for node, subjects in sorted(now.moved.items())
        for subject, ago_s in sorted(subjects.items(), key=lambda item: item[1])
        if ago_s < MOVING_S
    ]
    return Look(left=left, still_s=now.still_s, moving=moving)


def wait_for_quiet(look: Callable[[], Look], *, within_s: float) -> list[str]:
    """Look until a lab has been without differences for `QUIET_S`, and return those that are left.

    One look without a difference is not enough: a link that flaps is up at some looks. What the kernels have reported
    tells whether it was up meanwhile. A lab that has differed must be quiet for `MOVING_S`. After `within_s`, or once
    the command was requested to stop, the next look with a difference ends the wait; so does one that shows no
    difference, but a change within the last seconds, after twice `MOVING_S` more.

    Args:
        look: looks once.
        within_s: how long the lab may differ.
    """
    deadline, last, quiet_s = Deadline(within_s), Deadline(within_s + 2 * MOVING_S), QUIET_S
    while True:
        seen = look()
        if seen.left:
            quiet_s = MOVING_S
            if deadline.is_over:
                return seen.left
        elif seen.still_s >= quiet_s:
            return []
        elif last.is_over:
            return seen.moving or [f"the lab was not watched long enough: {seen.still_s:.1f} of {quiet_s:g} s"]
        time.sleep(_INTERVAL_S if seen.left else max(_INTERVAL_S, quiet_s - seen.still_s))


def _look(lab: Lab, before: Fingerprint) -> Look:
    now = capture(lab)
    found = list(differences(before, now))
    if any(subject.startswith(OF_TRAFFIC) for _, subject, _ in found):
        # Read after the capture: if that command has ended since, its traffic is a difference, and it is looked again.
        by_others = lab.held_by_others()
        found = [
            (node, subject, line)
            for node, subject, line in found
            if not (subject.startswith(OF_TRAFFIC) and (node in by_others or WHOLE_LAB in by_others))
        ]
    return look_of([line for _, _, line in found], now)
