"""What a fault is once it is aimed: place, request, commands, witnesses; and what the families of kinds share."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inject.selection import Selection
from testbed.errors import Unsupported, UsageError
from testbed.model.topology import Link, Port, Target, Topology

__all__ = [
    "Learn",
    "Place",
    "Request",
    "Shot",
    "Step",
    "Witness",
    "held",
    "link_of",
    "on_host",
    "on_switch",
    "rnic_counters",
    "trains",
]

MOST_FLAPS = 100_000
_HALF = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the holder runs: on `node` (inside `netns`, if set), or on this machine beside QEMU (`local`)."""

    node: str
    netns: str | None = None
    local: bool = False

    @property
    def name(self) -> str:
        """What the inventory calls the host or switch that it is: a switch's namespace has its name."""
        return self.netns or self.node


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One change and its revert, as commands that a person can read and type."""

    do: str
    undo: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """Counters of which one must move by `at_least` between just before arming and some time after clearing.

    The most telling come first: the first one that moved enough is named in the receipt.
    """

    any_of: tuple[str, ...]
    at_least: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Learn:
    """What is only known just before arming: the RNIC's QP, and the PSN that passes the hop, plus `psn_ahead`."""

    host: str
    rnic: str
    qp: int | str
    psn_ahead: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What `take` needs to know of a fault that has been validated."""

    id: str
    kind: str
    target: Target
    for_s: float
    params: Mapping[str, Any]
    topology: Topology
    where: str
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """How a fault is done. The fields are those of `inject.fault_plan.PlannedFault`.

    `shows` is what the readback after arming must say besides `applied`: that the change is where it was to be.
    `while_on` are states (`node/name`, value) that are read by another way than the holder's while the fault is on;
    None: nothing of that name is there. `of_workload`: what is changed is there only while a workload runs.
    `complete_after` is set where the fault is over by its nature once it has struck so often: then its window is only
    the time in which that may happen (`inject.evidence.firing_times`).
    `selection` is how the seed decides which packets are taken; None: nothing is left to a draw.
    """

    place: Place
    request: Mapping[str, Any]
    steps: tuple[Step, ...]
    must_move: tuple[Witness, ...]
    must_not_move: tuple[str, ...]
    restored: tuple[tuple[str, int | None], ...] = ()
    shows: Mapping[str, Any] = field(default_factory=dict)
    while_on: tuple[tuple[str, int | None], ...] = ()
    learn: Learn | None = None
    of_workload: bool = False
    complete_after: int | None = None
    selection: Selection | None = None


def held(
    asked: Request,
    actuator: str,
    args: dict[str, Any],
    *,
    claims: str,
    edges: list[list[Any]] | None = None,
    patience_s: float | None = None,
) -> dict[str, Any]:
    """The holder's request; `claims` is the path of what is changed, by which faults collide (see `conflicts`).

    `patience_s` is how much longer than others its revert may take; it is said only where it is needed.
    """
    return {
        **({} if patience_s is None else {"patience_s": patience_s}),
        "do": "prepare",
        "id": asked.id,
        "actuator": actuator,
        "claims": claims,
        "args": args,
        "edges": edges or [[0.0, True]],
        "window_s": asked.for_s,
    }


def rnic_counters(topology: Topology, *names: str, but: str | None = None) -> tuple[str, ...]:
    """One counter of every RNIC (of every host but one), then the next: the order in which they are believed."""
    return tuple(
        f"{host.name}/{rnic.name}.{name}"
        for name in names
        for host in topology.hosts
        if host.name != but
        for rnic in host.rnics
    )


def on_switch(asked: Request, switch: str) -> Place:
    """The namespace of a switch on the machine that carries it, or the machine that is a switch and runs Linux."""
    known = asked.topology.switch_by_name[switch]
    if known.carrier is not None:
        return Place(node=known.carrier, netns=switch)
    if known.is_linux:
        return Place(node=switch)
    raise Unsupported(f"{asked.where}.target: switch {switch} is not carried by a machine of this lab")


def on_host(asked: Request) -> Place:
    """The host that the target is, or is on."""
    return Place(node=asked.target.node)


def link_of(asked: Request) -> tuple[Link, Port]:
    """The one link of the target, and the target's port on it."""
    if asked.target.link is None or asked.target.port is None:
        raise UsageError(f"{asked.where}.target: {asked.target.text} is not one link")
    return asked.target.link, asked.target.port


def trains(asked: Request) -> list[list[Any]]:
    """Edges (seconds from the onset, on) of a fault that comes and goes: `period`, `duty` (else half), `count`."""
    period_s, count = asked.params.get("period"), asked.params.get("count")
    if period_s is None:
        if count not in (None, 1):
            raise UsageError(f"{asked.where}.count: {count} flaps need a period")
        return [[0.0, True]]
    edges: list[list[Any]] = []
    for k in itertools.count():
        down_s, up_s = round(k * period_s, 6), round((k + asked.params.get("duty", _HALF)) * period_s, 6)
        if down_s >= asked.for_s or k == count:
            return edges
        if k == MOST_FLAPS:
            raise UsageError(f"{asked.where}.period: more than {MOST_FLAPS} flaps in one window; lengthen the period")
        edges.append([down_s, True])
        if up_s < asked.for_s:
            edges.append([up_s, False])
    return edges
