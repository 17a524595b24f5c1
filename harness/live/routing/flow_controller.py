"""The controller of the scheme `te`: it places flows again every cycle, and when a switch reports a change.

Each cycle reads the switches, computes the placement over the links that are live, and sends the difference to the
switches' rules through the scheme's lease. Nothing is remembered from one cycle to the next, so that a controller that
is started again writes the same rules. If the controller dies, its leases end, and every packet takes BGP's ECMP.
"""

from __future__ import annotations

import ipaddress
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from faultbed.harness.experiment.fabric_file import Fabric
from faultbed.harness.live.routing.routing_probes import installed_rules
from faultbed.harness.verdict import FlowPlacement, FlowPlacements
from faultbed.inject.journal import Journal
from faultbed.inject.routing.scheme_lease import LEASE_TTL_S, SchemeLease
from faultbed.testbed.errors import LabError
from faultbed.testbed.lab import Lab
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.observe import counters, switch_routing
from faultbed.testbed.observe.telemetry import Change
from faultbed.testbed.routing.live_placement import LivePlacement, every_key, failed_links, place_on_live_links
from faultbed.testbed.routing.measured_demands import measured_demands
from faultbed.testbed.routing.offered_load import Fabric as LoadedFabric
from faultbed.testbed.routing.offered_load import offered_load
from faultbed.testbed.routing.placement_of_flows import Key
from faultbed.testbed.routing.schemes import Flow, Routing, scheme_named
from faultbed.testbed.routing.switch_tables import SchemeTables, scheme_tables

__all__ = ["FlowController"]

_OF_ROUTING = ("link ", "nexthop ", "route ")
"""Beginnings of the subjects of changes that may need another placement."""
_WORTH_MOVING = 0.95
"""Measured demands differ from cycle to cycle: keys move only if the fullest link then carries less than this share."""
_STOP_S = 90.0
"""How long the end of a cycle may take: an answer of a switch's machine takes up to 60 s."""
_MOST = 1000
"""Placements and errors that are kept."""

Cause = Literal["start", "cycle", "change"]
Rules = set[tuple[int, int, str | None, int, str]]


class FlowController:
    """Places the flows of a lab while a scheme is applied.

    `tables` are the rules that the switches should have now.

    Args:
        lab: whose switches have the scheme.
        fabric: the scheme's parameters.
        tables: the scheme without rules.
        leases: that hold it, one for each machine with switches.
        journal: records each placement.
        demands: bytes of each key by the workload's schedule; empty: every key counts alike until ports have counted.
    """

    def __init__(
        self,
        lab: Lab,
        fabric: Fabric,
        tables: SchemeTables,
        leases: Sequence[SchemeLease],
        journal: Journal,
        demands: Mapping[Key, float],
    ) -> None:
        self._lab, self._fabric, self._leases, self._journal = lab, fabric, leases, journal
        self.tables = tables
        self._demands = dict(demands)
        self._counted: dict[str, dict[str, int]] | None = None
        self._looks_ns: list[int] = []
        """When each cycle that ended without an error began."""
        self._placements: list[FlowPlacement] = []
        self._errors: list[str] = []
        self._last_error = ""
        self._has_news, self._is_stopped = threading.Event(), threading.Event()
        self._stopped_ns = 0
        self._thread = threading.Thread(target=self._run, name="placement of flows", daemon=True)

    def place(self, cause: Cause) -> None:
        """Run one cycle.

        Raises:
            FaultError: a switch refuses a rule.
            LabError: a machine does not answer, or its rules are not those that were sent.
            UsageError: a demand is not finite or negative, or a key names something that the lab does not have.
        """
        begin_ns = time.monotonic_ns()
        topology = self._lab.topology
        state = switch_routing.read(self._lab, topology.switch_by_name).switches
        failed = failed_links(topology, {name: switch["tables"].get("main", {}) for name, switch in state.items()})
        live = place_on_live_links(topology, self._demands_now(), failed)
        held = {name: installed_rules(state[name]) for name in self.tables.switches}
        tables = self._tables(live.placement.uplink)
        if self._fabric.demand == "measured" and not _is_worth_moving(topology, self._demands, live, held, tables):
            tables = self.tables
        self.tables = tables
        if any(set(tables.rules(name)) != rules for name, rules in held.items()):
            for lease in self._leases:
                lease.update(tables)
            after = switch_routing.read(self._lab, tables.switches).switches
            if wrong := [name for name in tables.switches if set(tables.rules(name)) != installed_rules(after[name])]:
                raise LabError(f"{wrong[0]}: its rules are not those that the controller sent; the next cycle repairs")
            self._record(cause, begin_ns, live, _moved_keys(topology, held, tables))
        self._looks_ns.append(begin_ns)

    def start(self) -> None:
        """Begin to place flows every cycle, on a thread of its own."""
        self._thread.start()

    def on_change(self, change: Change) -> None:
        """Place flows at once if a switch reports a change of a link or a route, and `backdoor` is on."""
        is_of_routing = change.node in self._lab.topology.switch_by_name and change.subject.startswith(_OF_ROUTING)
        if self._fabric.backdoor and is_of_routing:
            self._has_news.set()

    def stop(self) -> None:
        """End after the cycle that is running. Safe to call twice."""
        self._is_stopped.set()
        self._has_news.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)
        self._stopped_ns = self._stopped_ns or time.monotonic_ns()

    def doubts(self) -> list[str]:
        """Return each reason to believe that nobody placed flows for a time. Call it after `stop`."""
        doubts = []
        allowed_s, gap_s = self._fabric.cycle + LEASE_TTL_S, self._largest_gap_s()
        if gap_s is None or gap_s > allowed_s:
            ran = "no cycle ended" if gap_s is None else f"no cycle ended without an error for {gap_s:.1f} s"
            why = f"; the last error: {self._last_error}" if self._last_error else ""
            doubts.append(f"the controller of te did not place flows: {ran} (at most {allowed_s:.1f} s){why}")
        if self._thread.is_alive():
            doubts.append("the controller of te did not stop, so its last cycle is unknown")
        return doubts

    def record(self) -> FlowPlacements:
        """Return what the controller did."""
        return FlowPlacements(
            cycles=len(self._looks_ns),
            largest_gap_s=self._largest_gap_s(),
            placements=tuple(self._placements),
            errors=tuple(self._errors),
        )

    def _run(self) -> None:
        begin_s = time.monotonic()
        while not self._is_stopped.is_set():
            has_news = self._has_news.wait(max(0.0, begin_s + self._fabric.cycle - time.monotonic()))
            if self._is_stopped.is_set():
                return
            self._has_news.clear()
            begin_s = time.monotonic()
            try:
                self.place("change" if has_news else "cycle")
            except Exception as error:  # noqa: BLE001 (the next cycle tries again; a gap that is too long is a doubt)
                self._last_error = f"{error}" or type(error).__name__
                self._journal.note("te.cycle", error=self._last_error)
                self._note_error(self._last_error)

    def _note_error(self, error: str) -> None:
        if len(self._errors) < _MOST:
            self._errors.append(error)

    def _largest_gap_s(self) -> float | None:
        """Return the longest time in s from one cycle to the next, or to the end; None: there was none."""
        if not self._looks_ns:
            return None
        borders = [*self._looks_ns, self._stopped_ns or time.monotonic_ns()]
        return max(later - earlier for earlier, later in itertools.pairwise(borders)) / 1e9

    def _demands_now(self) -> dict[Key, float]:
        topology = self._lab.topology
        if self._fabric.demand == "measured":
            now = counters.read(self._lab, topology.switch_by_name)
            before, self._counted = self._counted, now
            measured = {} if before is None else measured_demands(topology, counters.flat_deltas(before, now))
            self._demands = measured or self._demands
        self._demands = self._demands or every_key(topology)
        return self._demands

    def _tables(self, uplinks: Mapping[Key, str]) -> SchemeTables:
        routing = replace(self._fabric.as_routing, uplinks=uplinks)
        return scheme_tables(self._lab.topology, self._fabric.routing, routing)

    def _record(self, cause: Cause, begin_ns: int, live: LivePlacement, moved: int) -> None:
        bound = live.placement.bound_bytes
        placement = FlowPlacement(
            at_ns=begin_ns,
            done_ns=time.monotonic_ns(),
            cause=cause,
            failed=tuple(sorted(live.failed)),
            keys=len(live.placement.uplink),
            moved=moved,
            without_path=len(live.without_path),
            bound_ratio=live.placement.fullest_bytes / bound if bound else None,
        )
        self._journal.note("te.placed", cause=cause, failed=placement.failed, moved=moved, keys=placement.keys)
        if len(self._placements) < _MOST:
            self._placements.append(placement)
        else:
            self._note_error(f"more than {_MOST} placements; the later ones are not recorded")


def _moved_keys(topology: Topology, held: Mapping[str, Rules], tables: SchemeTables) -> int:
    """Return how many keys had a rule before and have another uplink now. A key has a rule for each of its prefixes."""
    host_of = {
        str(ipaddress.ip_interface(rnic.address).network): host.name for host in topology.hosts for rnic in host.rnics
    }
    moved = set()
    for switch, rules in held.items():
        before = {(source, prefix): table for _, table, prefix, _, source in rules}
        for _, table, prefix, _, source in tables.rules(switch):
            if before.get((source, prefix), table) != table:
                moved.add((switch, source, host_of.get(prefix or "", "")))
    return len(moved)


def _is_worth_moving(
    topology: Topology,
    demands: Mapping[Key, float],
    live: LivePlacement,
    held: Mapping[str, Rules],
    tables: SchemeTables,
) -> bool:
    """Return whether a placement of measured demands is clearly better than the rules that the switches have.

    It is if these rules lack a key, send one to a dead link, or fill a link clearly more.
    """
    old = _uplinks_of(topology, held, tables)
    if any(old.get(key, "") in (live.failed | {""}) for key in live.placement.uplink):
        return True
    first_rnic = {host.name: f"{host.name}:{host.rnics[0].name}" for host in topology.hosts if host.rnics}
    flows = [
        Flow(src=source, dst=first_rnic[host], size_bytes=size_bytes, src_port=0, dst_qpn=0)
        for (source, host), size_bytes in demands.items()
        if (source, host) in live.placement.uplink
    ]
    fabric = LoadedFabric.of(topology, scheme_named(tables.scheme.name), Routing(uplinks=old), failed=live.failed)
    load = offered_load(fabric, flows)
    return live.placement.fullest_bytes < _WORTH_MOVING * max(load.values(), default=0.0)


def _uplinks_of(topology: Topology, held: Mapping[str, Rules], tables: SchemeTables) -> dict[Key, str]:
    """Return the uplink of each key whose rules all name the same one."""
    uplinks: dict[Key, str] = {}
    for switch, rules in held.items():
        port_of = {table: port for port, table in tables.switches[switch].table_by_port.items()}
        name_of = {link.end(switch).netdev: link.name for link in topology.links_of(switch) if link.is_uplink}
        by_match = {(source, prefix): name_of.get(port_of.get(table, ""), "") for _, table, prefix, _, source in rules}
        for link in topology.links_of(switch):
            for host in topology.hosts if link.rnic else ():
                prefixes = [str(ipaddress.ip_interface(rnic.address).network) for rnic in host.rnics]
                names = {by_match.get((link.a.netdev, prefix), "") for prefix in prefixes}
                if len(names) == 1:
                    uplinks[f"{link.b.node}:{link.rnic}", host.name] = names.pop()
    return {key: name for key, name in uplinks.items() if name}
