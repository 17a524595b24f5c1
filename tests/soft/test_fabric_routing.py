"""Routing schemes on the lab's switches: what links carried, no-op mutations, a killed controller, what heal removes.

The numbers of three racks need `pytest -m "" --lab soft-3rack tests/soft/test_fabric_routing.py`, and the cost of a
collision `pytest -m "" --lab soft-tapered tests/soft/test_fabric_routing.py -k costs`.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from math import comb

import numpy as np
import pytest
from scheme_runs import mmr, rules, run
from waiting import until, wait_s

from faultbed.harness.analysis.intervals import operation_times
from faultbed.harness.verdict import Verdict
from faultbed.inject.heal import heal
from faultbed.inject.journal import Journal
from faultbed.inject.node.inside import vtysh
from faultbed.inject.routing.scheme_lease import SchemeLease
from faultbed.testbed.observe import counters, fingerprint, switch_routing
from faultbed.testbed.routing.schemes import SCHEMES, Routing
from faultbed.testbed.routing.switch_tables import scheme_tables
from faultbed.traffic.engine.engine_client import Engines
from faultbed.traffic.engine.task_specs import QpParams
from faultbed.traffic.flows import flow_run
from faultbed.traffic.flows.flow_run import FlowSpec
from faultbed.traffic.probes.ecmp_entropy import data_and_ack_paths
from faultbed.traffic.workloads import collective
from faultbed.traffic.workloads.collective import CollectiveSpec

pytestmark = [pytest.mark.soft, pytest.mark.slow, pytest.mark.needs("hosts >= 4", "uplinks >= 2")]

FAULT = """
[[faults]]
id = "uplink"
kind = "link.flap"
target = "rtsw1:ctsw1"
at = "10s"
for = "2s"
[[expect]]
metric = "jct_ratio"
max = 5.0
"""

BYTES = """
[[expect]]
metric = "link_bytes.error"
max = 0.15
"""


@pytest.mark.parametrize("scheme", SCHEMES)
def test_routing_scheme_routes_the_workload_is_proved_and_leaves_nothing(lab, tmp_path, scheme):
    finished = run(lab, tmp_path, scheme)
    verdict = finished.verdict

    print(scheme, verdict.routing)
    assert verdict.verdict is Verdict.PASS, verdict.checks
    assert verdict.lab_state == "CLEAN"
    assert verdict.routing.decisions.agreed == verdict.routing.decisions.queried > 0
    assert not any(rules(lab).values())


def test_e_ecmp_loads_links_as_its_computed_decisions(lab, tmp_path):
    """The hash of each queue pair is computed beforehand; what links carried differs by headers and control traffic."""
    finished = run(lab, tmp_path, "e-ecmp", more=BYTES, iterations=20)

    check = next(check for check in finished.verdict.checks if check.name == "link_bytes.error")
    print(check.observed, check.detail)
    assert check.verdict is Verdict.PASS, check


def test_e_ecmp_with_16_queue_pairs_per_peer_shares_uplinks_within_a_quarter(lab, tmp_path):
    """Results of both racks and three hash seeds are pooled. Each run's bytes agree with its computed decisions."""
    ratios = []
    for seed in (1, 2, 3):
        words = {"fabric": f"qp_hash_seed = {seed}", "workload": "qps_per_peer = 16", "size": "1MiB"}
        finished = run(lab, tmp_path / str(seed), "e-ecmp", more=BYTES, iterations=4, words=words)
        assert finished.verdict.verdict is Verdict.PASS, finished.verdict.checks
        assert len(finished.run_dir.read_run().workload.connections) == 12 * 16
        ratios += [mmr(finished, "rtsw1"), mmr(finished, "rtsw2")]
    print([f"{ratio:.3f}" for ratio in ratios])
    assert sum(ratios) / len(ratios) <= 1.25


@pytest.mark.parametrize(("scheme", "fewest", "most"), [("ecmp", 1, 1), ("e-ecmp", 2, 2)])
def test_queue_pairs_with_one_source_port_take_paths_by_scheme(lab, tmp_path, scheme, fewest, most):
    """ECMP by 5-tuple puts all queue pairs from one RNIC to another on one path, E-ECMP spreads them."""
    words = {"workload": "qps_per_peer = 16\nentropy = 1", "size": "1MiB"}
    finished = run(lab, tmp_path, scheme, more=BYTES, iterations=4, words=words)
    assert finished.verdict.verdict is Verdict.PASS, finished.verdict.checks
    paths = {}
    for one in finished.run_dir.read_run().workload.connections:
        if one.src[:5] in ("host1", "host2") and one.dst[:5] in ("host3", "host4"):
            paths.setdefault((one.src, one.dst), []).append((one.udp_sport, one.path))
    assert [len(each) for each in paths.values()] == [16] * 4
    assert {sport for each in paths.values() for sport, _ in each} == {paths["host1:rxe0", "host3:rxe0"][0][0]}
    counts = [len({path for _, path in each}) for each in paths.values()]
    print(scheme, counts)
    assert fewest <= min(counts) <= max(counts) <= most


def test_spray_fills_uplinks_equally_and_reorders_nothing(lab, tmp_path):
    """Both paths are equally fast, so no packet overtakes another one, and no receiver sees a gap."""
    finished = run(lab, tmp_path, "spray", iterations=20)
    measured = finished.run_dir.read_run()

    assert mmr(finished, "rtsw1") == pytest.approx(1.0, abs=0.02)
    gaps = {
        host: after.get("rxe0.out_of_seq_request", 0)
        - measured.telemetry.counters_before[host].get("rxe0.out_of_seq_request", 0)
        for host, after in measured.telemetry.counters_after.items()
        if host in lab.topology.host_by_name
    }
    print(gaps)
    assert not any(gaps.values())


def test_ecmp_whose_switches_nobody_watches_is_inconclusive(lab, tmp_path):
    """BGP routes as it always does, but the holder that would see a change does nothing."""
    verdict = run(lab, tmp_path, "ecmp", iterations=2, mutations={"routing": "noop"}).verdict

    assert verdict.verdict is Verdict.INCONCLUSIVE, verdict.checks
    assert verdict.routing.unproven == ("not applied: the readback does not show it",)
    assert verdict.lab_state == "CLEAN"


@pytest.mark.parametrize(("scheme", "mutate"), [("static-parity", "noop"), ("e-ecmp", "lie")])
def test_routing_scheme_without_effect_is_inconclusive(lab, tmp_path, scheme, mutate):
    """A scheme's effect is read from the kernels of the switches, whatever its holder claims."""
    verdict = run(lab, tmp_path, scheme, iterations=2, mutations={"routing": mutate}).verdict

    assert verdict.verdict is Verdict.INCONCLUSIVE, verdict.checks
    assert verdict.routing.decisions.agreed == 0
    assert verdict.routing.armed.ok is False, "a lie about `applied` does not make the readback whole"
    assert verdict.lab_state == "CLEAN"


@pytest.mark.parametrize(("mutate", "verdict"), [(None, Verdict.PASS), ("noop", Verdict.INCONCLUSIVE)])
def test_fault_and_its_twin_run_under_the_routing_scheme(lab, tmp_path, mutate, verdict):
    """An uplink flaps under a static scheme. The fault is proved, and run and twin have the complete scheme."""
    words = {"length": 'duration = "45s"', "workload": "qps_per_peer = 2"}
    finished = run(
        lab, tmp_path, "static-parity", more=FAULT, words=words, mutations={"faults": mutate} if mutate else {}
    )
    result = finished.verdict

    print([(check.name, check.verdict, check.observed, check.detail) for check in result.checks], result.routing)
    assert result.verdict is verdict
    assert next(check for check in result.checks if check.name == "fired.uplink").verdict is verdict
    assert result.lab_state == "CLEAN"
    assert result.routing.unproven == ()
    assert finished.run_dir.read_run().fault_free
    decisions = [
        entry["data"]
        for line in (finished.run_dir.path / "journal.jsonl").read_text().splitlines()
        if (entry := json.loads(line))["op"] == "routing.decisions" and "asked" in entry["data"]
    ]
    assert [(decision["asked"] > 0, decision["wrong"]) for decision in decisions] == [(True, [])] * 2, (
        "of the twin, and of the run"
    )
    assert not any(rules(lab).values())


ROUTE = """
old=$(ip -4 route show table 1001 | head -1)
new=$(ip -4 route show table 1002 | grep "^${old%% *} ")
ip route replace table 1001 $new
sleep 2
ip route replace table 1001 $old
"""
RULE = """
to=$(ip rule show priority 1000 | head -1 | sed 's/.*to \\([^ ]*\\) lookup \\([0-9]*\\) .*/to \\1 lookup \\2/')
ip rule del $to priority 1000
sleep 2
ip rule add $to priority 1000 protocol 251
"""
MARKS = """
before=$(nft list table ip faultbed_routing)
nft flush chain ip faultbed_routing choose
sleep 2
echo "$before" | nft -f -
"""
TABLE = """
nft add table inet other
sleep 2
nft delete table inet other
"""
MAIN = """
old=$(ip -4 route show proto bgp | grep -v '^default' | awk '/^[0-9]/ {print $1}' | head -1)
ip route add ${old%/*}/32 dev ctsw2 via inet6 fe80::1 onlink
sleep 2
ip route del ${old%/*}/32
"""
SESSIONS = f"{vtysh('rtsw1')} -c 'clear bgp *'"


@pytest.mark.parametrize(
    ("scheme", "script", "reason"),
    [
        ("pinned", "", ""),
        ("pinned", ROUTE, "routes were not the scheme's: "),
        ("static-parity", RULE, "rules of the scheme were missing"),
        ("e-ecmp", MARKS, "the nftables marks were not the scheme's"),
        ("e-ecmp", TABLE, "nftables had a table of another program, whose rules may change marks: inet other"),
        ("pinned", SESSIONS, "and no fault at that place explains it"),
        ("ecmp", "", ""),
        ("ecmp", MAIN, "/32 of another program (protocol 3)"),
        ("ecmp", SESSIONS, "and no fault at that place explains it"),
    ],
    ids=["nothing", "route", "rule", "marks", "table", "sessions", "ecmp-nothing", "ecmp-route", "ecmp-sessions"],
)
def test_scheme_changed_and_put_back_while_the_workload_runs_is_not_proved(lab, tmp_path, scheme, script, reason):
    """Another shell changes it for 2 s; before the workload and after it, everything is as the scheme says."""
    shells = []

    def change():
        wait_s(4.0)
        lab.node("rtsw1").run(["sh", "-ec", script], timeout_s=60.0)

    def progress(line):
        print(line)
        if script and line == "workload is running":
            shells.append(threading.Thread(target=change))
            shells[0].start()

    finished = run(lab, tmp_path, scheme, words={"length": 'duration = "20s"'}, progress=progress)
    for shell in shells:
        shell.join()
    routing = finished.verdict.routing

    print(finished.verdict.verdict, routing)
    if not script:
        assert (finished.verdict.verdict, routing.unproven, routing.deviations) == (Verdict.PASS, (), ())
        return
    assert finished.verdict.verdict is Verdict.INCONCLUSIVE
    assert any(one.startswith("rtsw1, from ") and reason in one for one in routing.unproven), routing.unproven
    if script != SESSIONS:
        ((begin_s, end_s),) = [(one.from_s, one.to_s) for one in routing.deviations]
        assert begin_s > 0
        assert end_s - begin_s > 1.5
    assert finished.verdict.lab_state == "CLEAN"


def armed_lease(lab, journal, scheme):
    tables = scheme_tables(lab.topology, scheme, Routing())
    lease = SchemeLease(lab, tables, lab.carrier("rtsw1").name, journal)
    lease.apply()
    assert lease.readback["whole"], lease.readback
    return lease


def test_routing_scheme_ends_with_its_controller(lab, tmp_path):
    """The channel ends, as when the controller is killed; the fixture checks that the lab looks as before."""
    with Journal(tmp_path / "journal.jsonl") as journal:
        lease = armed_lease(lab, journal, "static-parity")
        assert any(rules(lab).values())
        lease.lease.release()
        print(f"BGP's again after {until(lambda: not any(rules(lab).values()), within_s=12.0):.1f} s")


def test_heal_removes_a_routing_scheme_without_a_holder(lab):
    """Leftovers of a killed machine (a rule, a table, a resilient group) make the lab DIRTY until `heal` removes
    them."""
    before = fingerprint.capture(lab)
    for words in (
        "rule add priority 1000 protocol 251 fwmark 1001 lookup 1001",
        "route add 10.77.2.0/31 dev ctsw1 table 1001 proto 251",
        "nexthop add id 1000000 dev ctsw1 proto 251",
    ):
        lab.node("rtsw1").run(["ip", *words.split()])
    left = fingerprint.settle(lab, before, within_s=0.0)
    kinds = {word for line in left for word in ("rule", "route", "nexthop") if word in line.split()}
    assert kinds == {"rule", "route", "nexthop"}, left
    healed = heal(lab)
    assert any("removed the routing scheme in rtsw1" in line for line in healed), healed
    assert fingerprint.settle(lab, before) == []


def test_withdrawn_prefix_leaves_the_routing_schemes_tables(lab, tmp_path):
    """One spine withdraws the far rack. The near switch's table for that uplink loses the route, the other keeps it."""
    with Journal(tmp_path / "journal.jsonl") as journal:
        lease = armed_lease(lab, journal, "pinned")

        def tables():
            return switch_routing.read(lab, ["rtsw1"]).switches["rtsw1"]["tables"]

        prefixes = set(tables()["1001"])
        lab.node("ctsw1").run(["ip", "link", "set", "rtsw2", "down"])
        try:
            until(lambda: not any(one.startswith("10.77.2.") for one in tables().get("1001", {})), within_s=20.0)
            now = tables()
            assert set(now["1002"]) == prefixes
            assert all(now["main"][prefix] == ["ctsw2"] for prefix in prefixes if prefix.startswith("10.77.2."))
        finally:
            lab.node("ctsw1").run(["ip", "link", "set", "rtsw2", "up"])
        until(lambda: set(tables().get("1001", {})) == prefixes, within_s=60.0)
        assert lease.release().ok
    assert not any(rules(lab).values())


@pytest.mark.needs("hosts >= 6")
@pytest.mark.parametrize(
    ("scheme", "hosts", "rack1", "others"),
    [
        ("static-parity", (1, 2, 3, 4), 1.0, {"rtsw2": 1.0}),
        ("static-parity", (1, 2, 3, 5), 2.0, {"rtsw2": 4 / 3, "rtsw3": 4 / 3}),
        ("te", (1, 2, 3, 5), 1.0, {"rtsw2": 4 / 3, "rtsw3": 4 / 3}),
    ],
)
def test_odd_and_even_hosts_load_the_uplinks_as_computed(lab, tmp_path, scheme, hosts, rack1, others):
    """A replaced host doubles the load of one uplink of rack 1; te places its four keys two by two.

    A host that is alone in its rack has three keys, so that one of two uplinks carries two of them.
    """
    finished = run(lab, tmp_path, scheme, hosts, iterations=20)

    ratios = {switch: mmr(finished, switch) for switch in ("rtsw1", *others)}
    print(scheme, hosts, ratios)
    assert ratios["rtsw1"] == pytest.approx(rack1, abs=0.1)
    for switch, value in others.items():
        assert ratios[switch] == pytest.approx(value, abs=0.1)


@pytest.mark.needs("hosts >= 6")
def test_collision_of_odd_even_routing_costs_job_time_where_uplinks_are_the_bottleneck(lab, tmp_path):
    """Host 5 replaces host 4, so all traffic out of rack 1 has one uplink. E-ECMP uses both."""
    if lab.inventory_model.rate_scale is None:
        pytest.skip("needs a lab whose uplinks have a rate below that of its hosts, such as soft-tapered")
    times_s = []
    for name, scheme, fabric in (
        ("static", "static-parity", ""),
        ("seed1", "e-ecmp", "qp_hash_seed = 1"),
        ("seed2", "e-ecmp", "qp_hash_seed = 2"),
    ):
        words = {"fabric": fabric, "workload": "qps_per_peer = 16", "size": "1MiB", "timeout": 21}
        finished = run(lab, tmp_path / name, scheme, (1, 2, 3, 5), iterations=6, words=words)
        assert finished.verdict.verdict is Verdict.PASS, finished.verdict.checks
        times = operation_times(finished.run_dir.read_run().workload.series) / 1e9
        print(f"{name}: {np.median(times):.2f} s an operation ({times.min():.2f} to {times.max():.2f})")
        print(f"MMR {', '.join(f'{switch} {mmr(finished, switch):.2f}' for switch in ('rtsw1', 'rtsw2', 'rtsw3'))}")
        times_s.append(float(np.median(times)))
    static_s, *hashed_s = times_s
    assert static_s / np.mean(hashed_s) >= 1.6, "two seeds: one alone may share the uplinks by chance as 1.25 to 1"


@pytest.mark.needs("hosts >= 6")
def test_collision_costs_an_all_reduce_time_by_its_algorithm(lab, tmp_path):
    """Points of `docs/sweeps/algorithms.toml`: ring, tree and halving-doubling, with host 5 instead of host 4.

    With odd/even routing all traffic out of rack 1 has one uplink, and halving-doubling has two flows on it at once.
    """
    if lab.inventory_model.rate_scale is None:
        pytest.skip("needs a lab whose uplinks have a rate below that of its hosts, such as soft-tapered")
    hosts = [f"host{number}" for number in (1, 2, 3, 5)]
    times_ms = {}
    with Journal(tmp_path / "journal.jsonl") as journal, Engines.start(lab, hosts) as engines:
        for scheme in ("static-parity", "e-ecmp"):
            lease = armed_lease(lab, journal, scheme)
            for algorithm in ("ring", "double-binary-tree", "recursive-halving"):
                for size_kib in (8, 256):
                    spec = CollectiveSpec(
                        collective="all-reduce",
                        algorithm=algorithm,
                        size_bytes=size_kib << 10,
                        ranks=tuple(f"{host}:rxe0" for host in hosts),
                        qps_per_peer=4,
                        warmup=1,
                        iterations=4,
                        op_deadline_s=60.0,
                        qp=QpParams(timeout=21),
                    )
                    result = collective.start(lab, spec, engines=engines).wait(240.0)
                    assert (result.outcome, result.wrong_elements) == ("completed", 0), result.where
                    times_ms[scheme, algorithm, size_kib] = result.time_ns / 1e6
                    print(f"{scheme} {algorithm} {size_kib} KiB: {result.time_ns / 1e6:.0f} ms")
            assert lease.release().ok
    ratios = {
        (algorithm, size_kib): time_ms / times_ms["e-ecmp", algorithm, size_kib]
        for (scheme, algorithm, size_kib), time_ms in times_ms.items()
        if scheme == "static-parity"
    }
    print({f"{algorithm} {size_kib} KiB": round(ratio, 2) for (algorithm, size_kib), ratio in ratios.items()})
    assert ratios["recursive-halving", 256] >= 1.2


FLOWS, ROUNDS = 24, 8


def mmr_band(flows, rounds, level=0.99):
    """Return the range of the mean MMR of two links over rounds in which each flow takes a random link.

    The distribution is exact: the fuller link of a round has max(k, flows - k) flows, with a binomial k.
    """
    fuller = defaultdict(float)
    for count in range(flows + 1):
        fuller[max(count, flows - count)] += comb(flows, count) / 2**flows
    sums = {0: 1.0}
    for _ in range(rounds):
        following = defaultdict(float)
        for total, chance in sums.items():
            for count, share in fuller.items():
                following[total + count] += chance * share
        sums = following
    below, low, high = 0.0, None, None
    for total in sorted(sums):
        below += sums[total]
        low = total if low is None and below > (1 - level) / 2 else low
        high = total if high is None and below >= 1 - (1 - level) / 2 else high
    return tuple(2 * total / (rounds * flows) for total in (low, high))


def test_ecmp_spreads_queue_pairs_as_balls_into_two_bins(lab):
    """One draw may have any MMR from 1 to 2. The mean of eight draws lies in a range, and bytes follow the paths."""
    observed, differences = [], []
    for _ in range(ROUNDS):
        before = counters.read(lab, ["rtsw1"])["rtsw1"]
        spec = FlowSpec(
            src="host1:rxe0", dst="host3:rxe0", qps=FLOWS, depth=1, message_bytes=16384, messages=FLOWS * 10,
            qp=QpParams(timeout=20),
        )  # fmt: skip
        with flow_run.start(lab, spec) as running:
            paths = data_and_ack_paths(lab, running.connections)
            result = running.wait(120.0)
        after = counters.read(lab, ["rtsw1"])["rtsw1"]
        assert result.outcome == "completed", result.where
        sent = [after[f"{port}.tx_bytes"] - before[f"{port}.tx_bytes"] for port in ("ctsw1", "ctsw2")]
        observed.append(max(sent) / (sum(sent) / 2))
        expected = sum("ctsw1" in data for data, _ in paths.values()) / FLOWS
        differences.append(abs(sent[0] / sum(sent) - expected))
    low, high = mmr_band(FLOWS, ROUNDS)
    print(f"MMR {[round(one, 2) for one in observed]}, mean {np.mean(observed):.3f}, 99 % band {low:.3f} to {high:.3f}")
    print(f"share of a link, measured less expected: at most {max(differences):.3f}")
    assert low - 0.01 <= np.mean(observed) <= high + 0.01, "1 % for headers and control traffic"
    assert max(differences) < 0.02
