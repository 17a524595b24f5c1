"""The mechanism of a resolved fault (place, holder request, commands, witnesses), and helpers that all kinds share."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.selection import Selection
from faultbed.testbed.errors import Unsupported, UsageError
from faultbed.testbed.model.topology import Link, Port, Target, Topology

__all__ = [
    "LateBinding",
    "Mechanism",
    "Place",
    "Request",
    "Step",
    "Witness",
    "flap_edges",
    "holder_request",
    "link_of",
    "on_host",
    "on_switch",
    "rnic_counters",
]

MOST_FLAPS = 100_000
"""Highest number of flaps in one fault: the holder's request lists every edge."""
_HALF = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the holder runs: on `node` (in `netns`, if set), or on the controller's machine beside QEMU (`local`)."""

    node: str
    netns: str | None = None
    local: bool = False

    @property
    def name(self) -> str:
        """The name in the inventory: the namespace of a switch has the switch's name."""
        return self.netns or self.node


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One change and its revert, as commands that a person can read and type."""

    do: str
    undo: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """Counters, at least one of which must move by `at_least` between arming and some time after clearing.

    The most specific counters come first: the receipt names the first one that moved enough.
    """

    any_of: tuple[str, ...]
    at_least: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LateBinding:
    """Values that are known only just before arming.

    `qp` is a QP number of the RNIC, or `any` or `any[K]`: the lowest of its connected QPs, or the one K places after
    it. The PSN is the current one plus `psn_ahead`; None: the PSN is known.
    """

    host: str
    rnic: str
    qp: int | str
    psn_ahead: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A fault whose mechanism is resolved.

    `spec` has validated times and parameters. `id` is that of its `PlannedFault`; errors begin with `where`.
    """

    spec: FaultSpec
    id: str
    target: Target
    topology: Topology
    where: str

    def with_params(self, params: Mapping[str, Any]) -> Self:
        """Return the request with other parameters."""
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, params=params))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mechanism:
    """How a fault is carried out on its target, and what proves it.

    Counters and states are named `node/name`, as in `faultbed.testbed.observe.counters`.

    Attributes:
        place: where the holder runs.
        request: what the controller sends to the holder (JSON).
        steps: the same changes and reverts, as commands for people.
        must_move: counters that prove that the fault fired.
        must_not_move: counters that must stay as they are ("bystanders").
        restored: states after the fault, as (name, value).
        shows: what the readback after arming must contain besides `applied`, to prove that the change is in place.
        while_on: states while the fault is on, as (name, value), read independently of the holder; None: no such state
            exists then.
        late_binding: what is known only when the fault is armed; None: everything is known.
        of_workload: whether what the fault changes exists only while a workload runs.
        complete_after: number of hits after which the fault is complete: its window is then only the time in which they
            may happen (`faultbed.inject.evidence.firing_times`); None: it lasts for its whole window.
        selection: how the seed chooses packets; None: nothing is drawn.
        quality: ports (`node/netdev`) whose rates of bit errors must be as before, once the fault is removed
            (`faultbed.inject.evidence.link_quality`).
    """

    place: Place
    request: Mapping[str, Any]
    steps: tuple[Step, ...]
    must_move: tuple[Witness, ...]
    must_not_move: tuple[str, ...]
    restored: tuple[tuple[str, int | None], ...] = ()
    shows: Mapping[str, Any] = field(default_factory=dict)
    while_on: tuple[tuple[str, int | None], ...] = ()
    late_binding: LateBinding | None = None
    of_workload: bool = False
    complete_after: int | None = None
    selection: Selection | None = None
    quality: tuple[str, ...] = ()


def holder_request(
    request: Request,
    actuator: str,
    args: dict[str, Any],
    *,
    claims: str,
    edges: list[list[Any]] | None = None,
    patience_s: float | None = None,
) -> dict[str, Any]:
    """Return the request for the holder; `claims` is the path of what the fault changes (`inject/policy/conflicts.py`).

    `patience_s` is how much longer than usual the revert may take; the request contains it only if it is set.
    """
    return {
        **({} if patience_s is None else {"patience_s": patience_s}),
        "do": "prepare",
        "id": request.id,
        "actuator": actuator,
        "claims": claims,
        "args": args,
        "edges": edges or [[0.0, True]],
        "window_s": request.spec.for_s,
    }


def rnic_counters(topology: Topology, *names: str, but: str | None = None) -> tuple[str, ...]:
    """Return the counters `names` of every RNIC (except on the host `but`): all RNICs' first counter, then the next."""
    return tuple(
        f"{host.name}/{rnic.name}.{name}"
        for name in names
        for host in topology.hosts
        if host.name != but
        for rnic in host.rnics
    )


def on_switch(request: Request, switch: str) -> Place:
    """Return the namespace of a switch on the machine that carries it, or the Linux machine that is the switch.

    Raises:
        Unsupported: no machine of the lab carries the switch.
    """
    model = request.topology.switch_by_name[switch]
    if model.carrier is not None:
        return Place(node=model.carrier, netns=switch)
    if model.is_linux:
        return Place(node=switch)
    raise Unsupported(f"{request.where}.target: no machine of this lab carries switch {switch}; choose another one")


def on_host(request: Request) -> Place:
    """Return the host that the target is, or is part of."""
    return Place(node=request.target.node)


def link_of(request: Request) -> tuple[Link, Port]:
    """Return the link of the target, and the target's port on it.

    Raises:
        UsageError: the target is no port or RNIC.
    """
    if request.target.link is None or request.target.port is None:
        raise UsageError(f"{request.where}.target: {request.target.text} is not a link; name a port or an RNIC")
    return request.target.link, request.target.port


def flap_edges(request: Request) -> list[list[Any]]:
    """Return the edges (seconds from the onset, on) of a fault with `period`, `duty` (default: half) and `count`.

    Raises:
        UsageError: a count without a period, or more than `MOST_FLAPS` flaps.
    """
    period_s, count = request.spec.params.get("period"), request.spec.params.get("count")
    if period_s is None:
        if count not in (None, 1):
            raise UsageError(f"{request.where}.count: {count} flaps need a period; add period")
        return [[0.0, True]]
    edges: list[list[Any]] = []
    for number in itertools.count():
        down_s, up_s = (
            round(number * period_s, 6),
            round((number + request.spec.params.get("duty", _HALF)) * period_s, 6),
        )
        if down_s >= request.spec.for_s or number == count:
            return edges
        if number == MOST_FLAPS:
            raise UsageError(f"{request.where}.period: more than {MOST_FLAPS} flaps in one window; lengthen the period")
        edges.append([down_s, True])
        if up_s < request.spec.for_s:
            edges.append([up_s, False])
    return edges
