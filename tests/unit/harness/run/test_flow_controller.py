"""The controller of te on switches that obey, ignore or half obey: what it writes, and when it is not believed."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from fake_switches import FakeSchemeLease, Switches

from faultbed.harness.experiment.fabric_file import Fabric
from faultbed.harness.live.routing import routing_scheme
from faultbed.harness.live.routing.flow_controller import FlowController
from faultbed.inject.journal import Journal
from faultbed.testbed.errors import LabError, UsageError
from faultbed.testbed.observe.telemetry import Change
from faultbed.testbed.routing.schemes import Routing
from faultbed.testbed.routing.switch_tables import scheme_tables

DEMANDS = {("host1:rxe0", "host3"): 1.0, ("host2:rxe0", "host4"): 1.0, ("host3:rxe0", "host1"): 1.0}
BYTES = {f"rtsw{rack}": {"ctsw1.tx_packets": 10, "ctsw2.tx_packets": 10} for rack in (1, 2, 3)}
AFTER = {f"rtsw{rack}": {"ctsw1.tx_packets": 910, "ctsw2.tx_packets": 910} for rack in (1, 2, 3)}


@pytest.fixture
def journal(tmp_path):
    with Journal(tmp_path / "journal.jsonl") as opened:
        yield opened


def controller_on(lab, journal, *, lease=FakeSchemeLease, demands=DEMANDS, **words):
    fabric = Fabric(routing="te", **words)
    tables = scheme_tables(lab.topology, "te", Routing())
    leases = [lease(lab, tables, "fabric", journal)]
    leases[0].apply()
    return FlowController(lab, fabric, tables, leases, journal, demands)


def rules(lab):
    return {name: sorted(lab.obeys.rules(name)) for name in lab.obeys.switches}


def test_flow_controller_places_each_key_and_restarted_writes_the_same_rules(journal):
    lab = Switches()
    first = controller_on(lab, journal)
    first.place("start")
    written = rules(lab)
    assert sum(map(len, written.values())) == 3 * 2, "a rule for each of the two prefixes of each destination"
    assert first.record().placements[0].moved == 0

    lab.obeys = None  # the lease ended with the controller
    again = controller_on(lab, journal)
    again.place("start")
    assert rules(lab) == written

    again.place("cycle")
    assert len(again.record().placements) == 1, "nothing is written while nothing changes"
    assert again.record().cycles == 2


def test_flow_controller_moves_only_keys_of_the_dead_link_and_comes_back(journal):
    lab = Switches()
    controller = controller_on(lab, journal)
    controller.place("start")
    written = rules(lab)
    lab.failed = frozenset({"rtsw1:ctsw1"})
    controller.place("change")
    assert {table for _, table, *_ in rules(lab)["rtsw1"]} == {1002}
    lab.failed = frozenset()
    controller.place("change")

    assert rules(lab) == written
    placements = controller.record().placements
    # host3 sends down to rtsw1 over that link, too: its uplink may have to change with it.
    assert [placement.failed for placement in placements] == [(), ("rtsw1:ctsw1",), ()]
    assert 1 <= placements[1].moved <= 2
    assert placements[0].bound_ratio == placements[1].bound_ratio == 1.0


class Noop(FakeSchemeLease):
    def update(self, tables):
        pass


class OtherLab(FakeSchemeLease):
    """Writes the rules of a lab with other demands."""

    def update(self, tables):
        uplinks = {("host1:rxe0", "host3"): "rtsw1:ctsw2"}
        self.lab.obeys = scheme_tables(self.lab.topology, "te", Routing(uplinks=uplinks))


class Half(FakeSchemeLease):
    """Loses the rules of one switch."""

    def update(self, tables):
        uplinks = {key: name for key, name in tables.routing.uplinks.items() if name.startswith("rtsw1")}
        self.lab.obeys = scheme_tables(self.lab.topology, "te", Routing(uplinks=uplinks))


@pytest.mark.parametrize("lease", [Noop, OtherLab, Half])
def test_flow_controller_whose_rules_are_not_on_the_switches_is_never_believed(journal, monkeypatch, lease):
    monkeypatch.setattr(routing_scheme, "SchemeLease", lease)
    lab = Switches()
    fabric = Fabric(routing="te", cycle=60.0)
    scheme = routing_scheme.scheme_of(lab, fabric, journal, demands=DEMANDS)
    with scheme.applied(journal):
        scheme.check_end(BYTES, AFTER, seconds=10.0)

    receipt = scheme.receipt()
    assert any("its rules are not those that the controller sent" in reason for reason in receipt.unproven)
    assert any("rules of the scheme missing" in reason for reason in receipt.unproven)
    assert any("did not place flows: no cycle ended" in reason for reason in receipt.unproven)


def test_flow_controller_that_works_proves_the_scheme(journal, monkeypatch):
    monkeypatch.setattr(routing_scheme, "SchemeLease", FakeSchemeLease)
    lab = Switches()
    scheme = routing_scheme.scheme_of(lab, Fabric(routing="te", cycle=60.0), journal, demands=DEMANDS)
    with scheme.applied(journal):
        assert lab.scheme is not None
        scheme.check_end(BYTES, AFTER, seconds=10.0)

    receipt = scheme.receipt()
    assert receipt.unproven == ()
    assert receipt.decisions.agreed == receipt.decisions.queried > 0
    assert receipt.placements.cycles == 1
    assert receipt.parameters == {"cycle": "60s", "backdoor": True, "demand": "schedule"}


def test_flow_controller_that_stood_still_is_a_doubt(journal, monkeypatch):
    """It read the switches at first, and for longer than a cycle and a lease nobody did."""
    lab = Switches()
    controller = controller_on(lab, journal, cycle=1.0)
    controller.place("start")
    controller._looks_ns[0] -= 12_000_000_000
    controller.stop()

    (doubt,) = controller.doubts()
    assert doubt.startswith("the controller of te did not place flows: no cycle ended without an error for 12.")
    assert doubt.endswith("(at most 11.0 s)")


def test_flow_controller_backdoor_places_at_once_only_for_changes_of_switches(journal):
    lab, placed = Switches(), threading.Event()
    controller = controller_on(lab, journal, cycle=3600.0)
    controller.place("start")
    controller.place = lambda cause: placed.set() if cause == "change" else None
    controller.start()
    for node, subject in (("host1", "link be0"), ("rtsw1", "kernel"), ("rtsw1", "address 10.0.0.1")):
        controller.on_change(Change(at_ns=1, node=node, subject=subject, text=None))
    assert not controller._has_news.is_set()
    assert not placed.is_set()
    controller.on_change(Change(at_ns=1, node="rtsw1", subject="link ctsw1", text="DOWN"))
    assert placed.wait(20.0)
    controller.stop()
    assert controller.doubts() == []


def test_flow_controller_without_backdoor_waits_for_its_cycle(journal):
    controller = controller_on(Switches(), journal, cycle=3600.0, backdoor=False)
    controller.on_change(Change(at_ns=1, node="rtsw1", subject="link ctsw1", text="DOWN"))
    assert not controller._has_news.is_set()


def test_flow_controller_cycle_that_fails_is_repeated_and_recorded(journal, monkeypatch):
    lab, done = Switches(), threading.Event()
    controller = controller_on(lab, journal, cycle=0.01)
    controller.place("start")
    answers = iter([LabError("fabric: no answer"), None])

    def place(cause):
        error = next(answers, None)
        if error is not None:
            raise error
        done.set()

    monkeypatch.setattr(controller, "place", place)
    controller.start()
    assert done.wait(20.0)
    controller.stop()
    assert controller.record().errors == ("fabric: no answer",)
    assert "fabric: no answer" in journal.path.read_text()


def test_flow_controller_measured_demands_move_keys_only_for_a_clearly_better_placement(journal, monkeypatch):
    lab = Switches()
    port_of = {f"{link.b.node}:{link.rnic}": (link.a.node, link.a.netdev) for link in lab.topology.links if link.rnic}
    counted = {switch.name: {} for switch in lab.topology.switches}

    def count(sent, received):
        for way, sizes in (("rx", sent), ("tx", received)):
            for rnic, size_bytes in sizes.items():
                switch, port = port_of[rnic]
                counted[switch][f"{port}.{way}_bytes"] = counted[switch].get(f"{port}.{way}_bytes", 0) + size_bytes

    reads = SimpleNamespace(read=lambda _lab, _names: {name: dict(values) for name, values in counted.items()})
    monkeypatch.setattr("faultbed.harness.live.routing.flow_controller.counters.read", reads.read)
    count({"host1:rxe0": 0, "host2:rxe0": 0}, {"host3:rxe0": 0, "host4:rxe0": 0})
    controller = controller_on(lab, journal, demands={}, demand="measured")
    controller.place("start")  # every key alike: nothing was counted
    assert sum(map(len, rules(lab).values())) > 50

    count({"host1:rxe0": 1000, "host2:rxe0": 1000}, {"host3:rxe0": 1000, "host4:rxe0": 1000})
    controller.place("cycle")
    first = controller.tables
    count({"host1:rxe0": 1010, "host2:rxe0": 1000}, {"host3:rxe0": 1000, "host4:rxe0": 1010})
    controller.place("cycle")
    assert controller.tables is first, "a difference of 1 % moves nothing"
    lab.failed = frozenset({"rtsw1:ctsw1"})
    count({"host1:rxe0": 1000, "host2:rxe0": 1000}, {"host3:rxe0": 1000, "host4:rxe0": 1000})
    controller.place("change")
    assert {table for _, table, *_ in rules(lab)["rtsw1"]} == {1002}


def test_flow_controller_refuses_a_key_of_another_lab(journal):
    controller = controller_on(Switches(), journal, demands={("host99:rxe0", "host3"): 1.0})
    with pytest.raises(UsageError, match="no such RNIC"):
        controller.place("start")
