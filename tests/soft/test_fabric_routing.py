"""Routing schemes on the lab's switches: what links carried, no-op mutations, a killed controller, what heal removes.

The numbers of three racks need `pytest -m "" --lab soft-3rack tests/soft/test_fabric_routing.py`.
"""

from __future__ import annotations

import pytest
from waiting import until

from harness.experiment import experiment_file
from harness.run import loop
from harness.verdict import Verdict
from inject.heal import heal
from inject.journal import Journal
from inject.routing.scheme_lease import SchemeLease
from testbed.observe import fingerprint, switch_routing
from testbed.routing.schemes import SCHEMES, Routing
from testbed.routing.switch_tables import scheme_tables

pytestmark = [pytest.mark.soft, pytest.mark.slow, pytest.mark.needs("hosts >= 4", "uplinks >= 2")]

TEXT = """
name = "scheme"
[fabric]
routing = "{scheme}"
[workload]
collective = "all-to-all"
size = "256KiB"
ranks = [{ranks}]
iterations = {iterations}
[workload.qp]
timeout = 18
[[expect]]
metric = "wrong_elements"
max = 0
"""
"""An ACK timeout of 1.1 s: on a busy machine the usual 67 ms send packets again that are not lost."""

BYTES = """
[[expect]]
metric = "link_bytes.error"
max = 0.15
"""


def run(lab, tmp_path, scheme, hosts=(1, 2, 3, 4), *, more="", iterations=8, **options):
    ranks = ", ".join(f'"host{number}:rxe0"' for number in hosts)
    text = TEXT.format(scheme=scheme, ranks=ranks, iterations=iterations) + more
    experiment = experiment_file.decode(text.encode(), source="scheme.toml")
    decided = loop.decide(experiment, text.encode(), lab.inventory_model)
    finished = loop.execute(decided, lab.inventory_model, out=tmp_path, progress=print, **options)
    lab.forget_connections()
    return finished


def rules(lab):
    return {name: one["rules"] for name, one in switch_routing.read(lab, lab.topology.switch_by_name).switches.items()}


def mmr(finished, switch):
    """Maximum over mean of what a switch sent up, by its ports' counters."""
    measured = finished.run_dir.read_measurements()
    before, after = measured.counters_before[switch], measured.counters_after[switch]
    sent = [after[f"{port}.tx_bytes"] - before[f"{port}.tx_bytes"] for port in ("ctsw1", "ctsw2")]
    return max(sent) * len(sent) / sum(sent)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_routing_scheme_routes_the_workload_is_proved_and_leaves_nothing(lab, tmp_path, scheme):
    finished = run(lab, tmp_path, scheme)
    verdict = finished.verdict

    print(scheme, verdict.routing)
    assert verdict.verdict is Verdict.PASS, verdict.checks
    assert verdict.lab_state == "CLEAN"
    assert verdict.routing.decisions.agreed == verdict.routing.decisions.asked > 0
    assert not any(rules(lab).values())


def test_e_ecmp_loads_links_as_its_computed_decisions(lab, tmp_path):
    """The hash of each queue pair is computed beforehand; what links carried differs by headers and control traffic."""
    finished = run(lab, tmp_path, "e-ecmp", more=BYTES, iterations=20)

    check = next(check for check in finished.verdict.checks if check.name == "link_bytes.error")
    print(check.observed, check.detail)
    assert check.verdict is Verdict.PASS, check


def test_spray_fills_uplinks_equally_and_reorders_nothing(lab, tmp_path):
    """Equal paths: no packet overtakes another one, so no receiver sees a gap."""
    finished = run(lab, tmp_path, "spray", iterations=20)
    measured = finished.run_dir.read_measurements()

    assert mmr(finished, "rtsw1") == pytest.approx(1.0, abs=0.02)
    gaps = {
        host: after.get("rxe0.out_of_seq_request", 0) - measured.counters_before[host].get("rxe0.out_of_seq_request", 0)
        for host, after in measured.counters_after.items()
        if host in lab.topology.host_by_name
    }
    print(gaps)
    assert not any(gaps.values())


@pytest.mark.parametrize(("scheme", "mutate"), [("static-parity", "noop"), ("e-ecmp", "lie")])
def test_routing_scheme_without_effect_is_inconclusive(lab, tmp_path, scheme, mutate):
    """A scheme's effect is read from the kernels of the switches, whatever its holder claims."""
    verdict = run(lab, tmp_path, scheme, iterations=2, mutate_routing=mutate).verdict

    assert verdict.verdict is Verdict.INCONCLUSIVE, verdict.checks
    assert verdict.routing.decisions.agreed == 0
    assert verdict.routing.armed["ok"] is False, "a lie about `applied` does not make the readback whole"
    assert verdict.lab_state == "CLEAN"


def held(lab, journal, scheme):
    tables = scheme_tables(lab.topology, scheme, Routing())
    lease = SchemeLease(lab, tables, lab.carrier("rtsw1").name, journal)
    lease.apply()
    assert lease.readback["whole"], lease.readback
    return lease


def test_routing_scheme_ends_with_its_controller(lab, tmp_path):
    """The channel ends, as when the controller is killed; the fixture checks that the lab looks as before."""
    with Journal(tmp_path / "journal.jsonl") as journal:
        lease = held(lab, journal, "static-parity")
        assert any(rules(lab).values())
        lease.lease.release()
        print(f"BGP's again after {until(lambda: not any(rules(lab).values()), within_s=12.0):.1f} s")


def test_heal_removes_a_routing_scheme_without_a_holder(lab):
    """A rule, a table and a resilient group that a killed machine might leave: DIRTY by the fingerprint, and healed."""
    before = fingerprint.capture(lab)
    for words in (
        "rule add priority 1000 protocol 251 fwmark 1001 lookup 1001",
        "route add 10.77.2.0/31 dev ctsw1 table 1001 proto 251",
        "nexthop add id 1000000 dev ctsw1 proto 251",
    ):
        lab.node("rtsw1").run(["ip", *words.split()])
    left = fingerprint.settle(lab, before, within_s=0.0)
    seen = {word for line in left for word in ("rule", "route", "nexthop") if word in line.split()}
    assert seen == {"rule", "route", "nexthop"}, left
    healed = heal(lab)
    assert any("removed the routing scheme in rtsw1" in line for line in healed), healed
    assert fingerprint.settle(lab, before) == []


def test_withdrawn_prefix_leaves_the_routing_schemes_tables(lab, tmp_path):
    """The far rack is withdrawn by one spine: the near switch's table of that uplink loses it, the other keeps it."""
    with Journal(tmp_path / "journal.jsonl") as journal:
        lease = held(lab, journal, "pinned")

        def tables():
            return switch_routing.read(lab, ["rtsw1"]).switches["rtsw1"]["tables"]

        prefixes = set(tables()["1001"])
        lab.node("ctsw1").run(["ip", "link", "set", "rtsw2", "down"])
        try:
            until(lambda: not any(one.startswith("10.77.2.") for one in tables().get("1001", {})), within_s=20.0)
            now = tables()
            assert set(now["1002"]) == prefixes
            assert all(now["main"][one] == ["ctsw2"] for one in prefixes if one.startswith("10.77.2."))
        finally:
            lab.node("ctsw1").run(["ip", "link", "set", "rtsw2", "up"])
        until(lambda: set(tables().get("1001", {})) == prefixes, within_s=60.0)
        assert lease.release().ok
    assert not any(rules(lab).values())


@pytest.mark.needs("hosts >= 6")
@pytest.mark.parametrize(
    ("hosts", "rack1", "others"),
    [((1, 2, 3, 4), 1.0, {"rtsw2": 1.0}), ((1, 2, 3, 5), 2.0, {"rtsw2": 4 / 3, "rtsw3": 4 / 3})],
)
def test_odd_and_even_hosts_load_the_uplinks_as_computed(lab, tmp_path, hosts, rack1, others):
    """A replaced host doubles the load of one uplink of rack 1."""
    finished = run(lab, tmp_path, "static-parity", hosts, iterations=20)

    seen = {switch: mmr(finished, switch) for switch in ("rtsw1", *others)}
    print(hosts, seen)
    assert seen["rtsw1"] == pytest.approx(rack1, abs=0.1)
    for switch, value in others.items():
        assert seen[switch] == pytest.approx(value, abs=0.1)
