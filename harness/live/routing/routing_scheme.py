"""Apply a run's routing scheme, verify it and remove it.

The scheme is applied after the initial fingerprint of the lab and removed before the final one: what remains of it
makes the lab DIRTY. `faultbed.harness.live.routing.routing_probes` compares it with what the switches' kernels decide.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from faultbed.harness.experiment.fabric_file import Fabric
from faultbed.harness.live.routing.flow_controller import FlowController
from faultbed.harness.live.routing.routing_probes import (
    changed_marks,
    missing_rules,
    query_decisions,
    wrong_marks,
    wrong_routes,
)
from faultbed.harness.live.routing.scheme_deviations import WorkloadTime, deviations_of, why_not_as_installed
from faultbed.harness.verdict import RoutingDecisions, RoutingReceipt, SchemeArmed, SchemeCleared, SchemeDeviation
from faultbed.inject.injector import Mutation
from faultbed.inject.journal import Journal
from faultbed.inject.routing.scheme_lease import LEASE_TTL_S, REMOVAL_TIMEOUT_S, SchemeLease, SchemeRelease
from faultbed.testbed.errors import FaultbedError, LabError
from faultbed.testbed.lab import Lab
from faultbed.testbed.observe import switch_routing
from faultbed.testbed.observe.counters import Snapshot, flat_deltas
from faultbed.testbed.observe.telemetry import Change
from faultbed.testbed.routing.placement_of_flows import Key
from faultbed.testbed.routing.switch_tables import SchemeTables, scheme_tables

__all__ = [
    "MAX_SCHEME_LIFETIME_S",
    "ActiveScheme",
    "apply_scheme",
    "least_packets",
    "not_removed",
    "scheme_of",
]

MAX_SCHEME_LIFETIME_S = LEASE_TTL_S + REMOVAL_TIMEOUT_S
"""Longest time that a scheme may stay on the switches after the controller has died."""
_LEAST_PACKETS = 100
"""Packets beyond the control traffic that show that the workload crossed the fabric."""
_CONTROL_PACKETS_PER_S = 3.0
"""Upper bound of the control packets that one port sends per second.

`timers bgp 1 3` sends one keepalive per second; the ACK of the neighbour's keepalive is at most another packet. The
third one covers router advertisements, neighbour discovery and ARP, which are rarer. An uplink without workload sent
60, 63 and 67 packets in three runs of 30 to 32 s on soft-mini (2.0 to 2.1 per second).
"""


@dataclass(kw_only=True)
class ActiveScheme:
    """The routing scheme of a run, from before it is applied. `receipt` is complete after the `applied` block ends."""

    fabric: Fabric
    tables: SchemeTables
    lab: Lab
    leases: list[SchemeLease] = field(default_factory=list)
    demands: Mapping[Key, float] = field(default_factory=dict)
    controller: FlowController | None = None
    armed: SchemeArmed = field(default_factory=SchemeArmed)
    decisions: RoutingDecisions = field(default_factory=lambda: RoutingDecisions(queried=0, agreed=0))
    marked: dict[str, int] | None = None
    carried_packets: int | None = None
    needed_packets: int = _LEAST_PACKETS
    workload: WorkloadTime | None = None
    deviations: tuple[SchemeDeviation, ...] = ()
    doubts: list[str] = field(default_factory=list)
    cleared: SchemeCleared = field(default_factory=SchemeCleared)
    applied_marks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The switches' state when the scheme was applied, if it marks packets."""

    @contextlib.contextmanager
    def applied(self, journal: Journal) -> Iterator[None]:
        """Apply the scheme for the block, and remove it from every machine at the end, also after an error.

        Raises:
            FaultError: a switch refuses the scheme; the message says why.
            LabError: the switches' machine does not answer, or another command has ended this run's holders.
        """
        released: dict[str, SchemeRelease] = {}

        def release(lease: SchemeLease) -> None:
            released[lease.planned.place.node] = lease.release()

        try:
            with contextlib.ExitStack() as releases:
                for lease in self.leases:
                    releases.callback(release, lease)
                self._apply(journal)
                if self.controller is not None:
                    releases.callback(self.controller.stop)
                    self.controller.start()
                yield
        finally:
            self.lab.scheme = None
            machines = [lease.planned.place.node for lease in self.leases]
            self.cleared = _cleared(machines, released)
            if self.cleared.by == "lease":
                self.doubts.append("the holder process ended before the run removed the scheme")
            self._judge_deviations(released.values())

    def _judge_deviations(self, released: Collection[SchemeRelease]) -> None:
        recorded = [deviation for release in released for deviation in release.deviations]
        applied_ns = self.armed.at_ns if isinstance(self.armed.at_ns, int) else 0
        self.deviations = deviations_of(recorded, self.lab.topology, self.workload, applied_ns=applied_ns)
        since = "of the run" if self.workload is not None else "after the scheme was applied"
        self.doubts += why_not_as_installed(self.deviations, since=since)

    def _apply(self, journal: Journal) -> None:
        try:
            for lease in self.leases:
                lease.apply()
            if self.tables.scheme.is_placed:
                self._place(journal)
        except FaultbedError as error:
            self.armed = SchemeArmed(error=str(error))
            raise
        self.armed = _armed(self.leases)
        self.lab.scheme = self.tables
        with journal.doing("routing.decisions", scheme=self.fabric.routing) as outcome:
            self.decisions = query_decisions(self.lab, self.tables)
            if self.tables.scheme.marks:
                self.applied_marks = switch_routing.read(self.lab, self.tables.switches).switches
            outcome |= {"asked": self.decisions.queried, "wrong": list(self.decisions.wrong)}

    def _place(self, journal: Journal) -> None:
        """Place the flows for the first time. If a switch does not show the rules, the scheme is not proven."""
        self.controller = FlowController(self.lab, self.fabric, self.tables, self.leases, journal, self.demands)
        try:
            self.controller.place("start")
        except LabError as error:
            self.doubts.append(f"{error}")
        self.tables = self.controller.tables

    def on_change(self, change: Change) -> None:
        """Tell the controller of a placed scheme, if there is one, what a machine's kernel reported."""
        if self.controller is not None:
            self.controller.on_change(change)

    def check_end(
        self,
        before: Snapshot,
        after: Snapshot,
        *,
        seconds: float,
        paths: Collection[Sequence[str]] = (),
        workload: WorkloadTime | None = None,
    ) -> None:
        """Check at the end of the workload that the scheme is still applied, and read the marked and carried packets.

        Args:
            before: counters before the workload.
            after: counters after it.
            seconds: time between the two readings.
            paths: the nodes that each connection of the workload crosses; an empty path is unknown. The counters also
                count probes and bystanders. If all paths are known and the scheme has a choice on none of them, the
                counted packets are not those of the workload.
            workload: its time, and its faults; None: what deviates from the scheme counts at any time.

        Raises:
            LabError: a machine could not answer.
        """
        self.workload = workload
        counters = _counters_of_choice(self.tables)
        self.carried_packets = _carried(counters, before, after)
        self.needed_packets = least_packets(len(counters), seconds)
        are_known = bool(paths) and all(paths)
        if are_known and not any(_has_choice(self.lab, path, counters) for path in paths):
            self.doubts.append("no connection of the workload uses a port that the scheme chooses from")
        self.check_still_applied()

    def check_still_applied(self) -> None:
        """Check at the end of the workload that the scheme is still applied, and read the marked packets.

        The rules are read from the kernels as well: another program on the switch may have removed them although the
        holder is alive.

        Raises:
            LabError: a machine could not answer.
        """
        if self.controller is not None:
            self.controller.stop()
            self.doubts += self.controller.doubts()
            self.tables = self.controller.tables
        for lease in self.leases:
            if not lease.is_applied():
                node = lease.planned.place.node
                self.doubts.append(f"{node}: the scheme was no longer applied at the end of the workload")
        state_by_switch = switch_routing.read(self.lab, self.tables.switches).switches
        self.doubts += missing_rules(self.tables, state_by_switch)
        self.doubts += wrong_marks(self.tables, state_by_switch) if self.tables.scheme.marks else []
        self.doubts += self._wrong_routes(state_by_switch)
        if self.tables.scheme.marks:
            self.doubts += changed_marks(self.applied_marks, state_by_switch)
            self.marked = {name: sum(state["marked"] or ()) for name, state in state_by_switch.items()}
            unmarked = [name for name, state in state_by_switch.items() if state["marked"] is None]
            self.doubts += [f"{name}: the scheme's marks were gone at the end of the workload" for name in unmarked]

    def _wrong_routes(self, state_by_switch: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Return what is wrong with the routes in two readings: in the first one the agent may be behind BGP."""
        wrong = wrong_routes(self.tables, state_by_switch)
        if not wrong:
            return []
        return wrong_routes(self.tables, switch_routing.read(self.lab, self.tables.switches).switches)

    def receipt(self) -> RoutingReceipt:
        """Return the evidence for the scheme and, in `unproven`, each reason why it does not prove the scheme."""
        return RoutingReceipt(
            scheme=self.fabric.routing,
            fidelity=self.tables.scheme.fidelity,
            parameters=self.fabric.parameters,
            armed=self.armed,
            decisions=self.decisions,
            marked=self.marked,
            carried_packets=self.carried_packets,
            deviations=self.deviations,
            placements=None if self.controller is None else self.controller.record(),
            cleared=self.cleared,
            unproven=tuple(self._unproven()),
        )

    def not_applied(self) -> Iterator[str]:
        """Yield each reason to believe that the switches did not route by the scheme, whatever they carried."""
        if not self.armed.ok:
            yield f"not applied: {self.armed.error or 'the readback does not show it'}"
        yield from self.decisions.wrong[:3]
        if not self.decisions.queried:
            yield "no decision of a switch was queried"
        yield from self.doubts

    def _unproven(self) -> Iterator[str]:
        yield from self.not_applied()
        if self.tables.scheme.marks and not sum((self.marked or {}).values()):
            yield "no switch marked a packet"
        if self.carried_packets is None or self.carried_packets < self.needed_packets:
            yield (
                f"only {self.carried_packets or 0} packets left by the ports that the scheme chooses from "
                f"(at least {self.needed_packets} needed)"
            )
        if not self.cleared.ok:
            yield f"not removed: {self.cleared.error or 'the readback still shows part of the scheme'}"


def scheme_of(
    lab: Lab,
    fabric: Fabric,
    journal: Journal,
    *,
    mutate: Mutation | None = None,
    demands: Mapping[Key, float] | None = None,
) -> ActiveScheme:
    """Return the scheme of `fabric`. The lab is not touched before `ActiveScheme.applied`.

    `demands` are the bytes that a placed scheme places; None: every RNIC sends alike to every host.
    """
    tables = scheme_tables(lab.topology, fabric.routing, fabric.as_routing)
    machines = dict.fromkeys(lab.carrier(name).name for name in tables.switches)
    leases = [SchemeLease(lab, tables, machine, journal, mutate=mutate) for machine in machines]
    return ActiveScheme(fabric=fabric, tables=tables, lab=lab, leases=leases, demands=demands or {})


@contextlib.contextmanager
def apply_scheme(
    lab: Lab, fabric: Fabric, journal: Journal, *, mutate: Mutation | None = None
) -> Iterator[ActiveScheme]:
    """Apply the scheme of `fabric`, yield it, and remove it at the end of the block.

    Raises:
        FaultbedError: as `ActiveScheme.applied`.
    """
    scheme = scheme_of(lab, fabric, journal, mutate=mutate)
    with scheme.applied(journal):
        yield scheme


def _armed(leases: Sequence[SchemeLease]) -> SchemeArmed:
    """Return the readback over all machines."""
    return SchemeArmed(
        ok=all(lease.readback.get("whole") is True and lease.readback.get("applied") is True for lease in leases),
        at_ns=max((lease.applied_ns or 0 for lease in leases), default=None),
        **{name: sum(lease.readback.get(name, 0) for lease in leases) for name in ("switches", "rules", "routes")},
    )


def _cleared(machines: Sequence[str], released: Mapping[str, SchemeRelease]) -> SchemeCleared:
    """Return how the scheme was removed. A machine without an outcome, as after Ctrl-C, may still have it."""
    errors = [outcome.detail for outcome in released.values() if not outcome.ok]
    errors += [f"{name}: the removal was interrupted" for name in machines if name not in released]
    return SchemeCleared(
        ok=not errors,
        by="lease" if any(outcome.by == "lease" for outcome in released.values()) else "holder",
        at_ns=max((outcome.at_ns for outcome in released.values()), default=None),
        copied=sum(outcome.readback.get("copied", 0) for outcome in released.values()),
        error="; ".join(errors) or msgspec.UNSET,
    )


def least_packets(ports: int, seconds: float) -> int:
    """Return how many packets must leave by `ports` ports within `seconds` to show that the workload crossed them.

    BGP alone sends a few packets per second and port, so that the minimum grows with the time between the readings.
    """
    return _LEAST_PACKETS + math.ceil(_CONTROL_PACKETS_PER_S * ports * seconds)


def _counters_of_choice(tables: SchemeTables) -> set[str]:
    """Return the packet counters (`node/name`) of all ports that a switch chooses from."""
    return {
        f"{name}/{port}.tx_packets"
        for name, switch_tables in tables.switches.items()
        for hops in switch_tables.hops.values()
        for port in hops
    }


def _has_choice(lab: Lab, path: Sequence[str], counters: Collection[str]) -> bool:
    """Return whether a path leaves some switch by one of the ports of `_counters_of_choice`."""
    steps = set(itertools.pairwise(path))
    return any(
        (near.node, far.node) in steps and f"{near.node}/{near.netdev}.tx_packets" in counters
        for link in lab.topology.links
        for near, far in ((link.a, link.b), (link.b, link.a))
    )


def _carried(counters: Collection[str], before: Snapshot, after: Snapshot) -> int | None:
    """Return the sum of the increments of `counters` that were read both times; None: none of them was."""
    deltas = flat_deltas(before, after)
    sent = [deltas[name] for name in counters if name in deltas]
    return sum(sent) if sent else None


def not_removed(receipt: RoutingReceipt | None) -> tuple[str, ...]:
    """Return one sentence if the scheme may still be on the switches, which makes the lab DIRTY; otherwise nothing."""
    if receipt is None or receipt.cleared.ok:
        return ()
    reason = receipt.cleared.error or "its removal was not read back"
    return (f"routing scheme {receipt.scheme} not removed: {reason}; run `faultbed heal`",)
