"""A routing scheme that did nothing never passes: every scheme on switches that obey, ignore or falsely confirm it."""

from __future__ import annotations

import dataclasses
from dataclasses import replace as replaced
from types import SimpleNamespace

import pytest
from fake_switches import TOPOLOGY, FakeSchemeLease, Switches
from finished_run import EVIL, finished, parsed
from msgspec.structs import replace
from pass_stand_ins import pass_of, setting_of
from synthetic_run import changed, synthetic_run

from faultbed.harness.analysis.observe import observe
from faultbed.harness.experiment import run_plan
from faultbed.harness.experiment.fabric_file import Fabric
from faultbed.harness.judge import judge
from faultbed.harness.live.routing import routing_scheme
from faultbed.harness.live.routing.routing_probes import query_decisions
from faultbed.harness.live.routing.scheme_deviations import FaultTime, WorkloadTime, fault_times
from faultbed.harness.parts.part import Planned
from faultbed.harness.parts.routing import routing_part
from faultbed.harness.record.rundir import RunDir
from faultbed.harness.report import run_page as report
from faultbed.harness.verdict import RoutingReceipt, Verdict, decode, encode
from faultbed.inject.evidence.receipt import Armed, Cleared
from faultbed.inject.fault_plan import plan_all
from faultbed.inject.journal import Journal
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.leases.lease import Lease
from faultbed.inject.routing.scheme_lease import Deviation, SchemeLease
from faultbed.testbed.errors import FaultError
from faultbed.testbed.model.selectors import resolve
from faultbed.testbed.observe.clock import ClockOffset
from faultbed.testbed.routing.schemes import SCHEMES, Routing, scheme_named
from faultbed.testbed.routing.switch_tables import scheme_tables
from faultbed.testbed.tenancy import interventions

APPLIED = [scheme for scheme in SCHEMES if scheme != "ecmp"]
BEFORE = {f"rtsw{rack}": {"ctsw1.tx_packets": 10, "ctsw2.tx_packets": 10} for rack in (1, 2, 3)}
AFTER = {f"rtsw{rack}": {"ctsw1.tx_packets": 510, "ctsw2.tx_packets": 510} for rack in (1, 2, 3)}


def fabric_of(scheme):
    return Fabric(routing=scheme, weights={"rtsw1:ctsw1": 3} if scheme == "weighted" else {})


@pytest.fixture
def apply(monkeypatch, tmp_path):
    monkeypatch.setattr(routing_scheme, "SchemeLease", FakeSchemeLease)

    def run(
        scheme,
        *,
        mutate=None,
        before=BEFORE,
        after=AFTER,
        seconds=10.0,
        flushed=False,
        overwritten=None,
        paths=(),
        workload=None,
        **changes,
    ) -> RoutingReceipt:
        lab = Switches()
        for name, value in changes.items():
            setattr(lab, name, value)
        with (
            Journal(tmp_path / "journal.jsonl") as journal,
            routing_scheme.apply_scheme(lab, fabric_of(scheme), journal, mutate=mutate) as one,
        ):
            assert (lab.scheme is None) is False
            if flushed:
                lab.obeys = None
            if overwritten is not None:
                lab.changes["by another program"] = overwritten
            one.check_end(before, after, seconds=seconds, paths=paths, workload=workload)
        assert lab.scheme is None
        return one.receipt()

    return run


def verdict_of(scheme, receipt):
    fabric = run_plan.PlannedFabric(routing=scheme, fidelity=scheme_named(scheme).fidelity)
    plan = run_plan.Plan(faultbed="0", experiment="x", seed=7, inventory="00", workload={}, faults=(), fabric=fabric)
    run = changed(synthetic_run(), faults=(), lab_state="CLEAN", lab_diff=(), routing=receipt)
    return judge(before=Planned(plan=plan, expectations=()), run=run, observed=observe(run)).verdict


@pytest.mark.parametrize("scheme", SCHEMES)
def test_routing_scheme_in_effect_is_proved_and_passes(apply, scheme):
    receipt = apply(scheme)

    assert receipt.unproven == ()
    assert receipt.decisions.queried == receipt.decisions.agreed >= 24
    verdict = verdict_of(scheme, receipt)
    check = next(check for check in verdict.checks if check.name == f"routing.{scheme}")
    assert (check.verdict, verdict.verdict) == (Verdict.PASS, Verdict.PASS)
    assert decode(encode(verdict)).routing == receipt


@pytest.mark.parametrize("scheme", SCHEMES)
def test_routing_scheme_is_not_proved_by_a_bystander(apply, scheme):
    """The workload stays in its rack, so the packets on the uplinks are those of the bystander or of probes."""
    inside, across = ("host1", "rtsw1", "host2"), ("host1", "rtsw1", "ctsw1", "rtsw2", "host3")
    receipt = apply(scheme, paths=[inside, inside[::-1]])
    assert receipt.unproven == ("no connection of the workload uses a port that the scheme chooses from",)
    assert verdict_of(scheme, receipt).verdict is Verdict.INCONCLUSIVE
    for known in ([inside, across], [across[::-1]], [inside, ()]):  # a sprayed connection has no single path
        assert apply(scheme, paths=known).unproven == ()


@pytest.mark.parametrize("mutate", ["noop", "lie"])
@pytest.mark.parametrize("scheme", APPLIED)
def test_routing_scheme_without_effect_is_inconclusive(apply, scheme, mutate):
    """With `lie` the holder confirms the scheme, but the answers of the kernels show that it is missing."""
    receipt = apply(scheme, mutate=mutate)

    assert receipt.decisions.agreed == 0
    assert receipt.armed.ok is (mutate == "lie")
    assert any("kernel uses table 254" in reason for reason in receipt.unproven)
    verdict = verdict_of(scheme, receipt)
    assert verdict.verdict is Verdict.INCONCLUSIVE
    assert next(check for check in verdict.checks if check.name == f"routing.{scheme}").verdict is Verdict.INCONCLUSIVE


def test_ecmp_whose_switches_are_not_watched_is_inconclusive(apply):
    """A holder that does nothing does not watch the switches; BGP itself routes as before."""
    receipt = apply("ecmp", mutate="noop")

    assert receipt.unproven == ("not applied: the readback does not show it",)
    assert verdict_of("ecmp", receipt).verdict is Verdict.INCONCLUSIVE


def test_routing_rules_left_by_another_scheme_are_not_ecmp(apply, monkeypatch):
    """ECMP needs no rules, so rules of another scheme mean that the switches do not use BGP's own ECMP."""
    left = scheme_tables(TOPOLOGY, "static-parity", fabric_of("ecmp").as_routing)
    receipt = apply("ecmp", obeys=left)

    assert receipt.decisions.agreed == 0
    assert verdict_of("ecmp", receipt).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("scheme", "changes", "reason_part"),
    [
        ("e-ecmp", {"marks": False}, "no switch marked a packet"),
        ("spray", {"marks": False}, "no switch marked a packet"),
        ("pinned", {"holds": False}, "fabric: the scheme was no longer applied at the end of the workload"),
        ("pinned", {"flushed": True}, "rtsw1: 8 of 8 rules of the scheme missing at the end of the workload"),
        ("resilient", {"flushed": True}, "rtsw1: 1 of 1 rules of the scheme missing at the end of the workload"),
        ("pinned", {"empties": True}, "rtsw1: 16 of 16 routes of the scheme missing at the end of the workload"),
        ("weighted", {"empties": True}, "rtsw1: 8 of 8 routes of the scheme missing at the end of the workload"),
        ("weighted", {"weighs": False}, "its next hops have the weights {'ctsw1': 1, 'ctsw2': 1}; the scheme expects"),
        ("e-ecmp", {"flushed": True}, "rtsw2: the scheme's marks were gone at the end of the workload"),
        ("pinned", {"releases": False}, "not removed: a rule is left"),
        (
            "pinned",
            {"after": BEFORE},
            "only 0 packets left by the ports that the scheme chooses from (at least 280 needed)",
        ),
        (
            "pinned",
            {"seconds": 600.0},
            "only 3000 packets left by the ports that the scheme chooses from (at least 10900",
        ),
        # The absolute counters of ports are not what they sent for the workload.
        (
            "pinned",
            {"before": {}},
            "only 0 packets left by the ports that the scheme chooses from (at least 280 needed)",
        ),
        (
            "pinned",
            {"after": {}},
            "only 0 packets left by the ports that the scheme chooses from (at least 280 needed)",
        ),
    ],
)
def test_routing_scheme_not_seen_to_route_the_workload_is_inconclusive(apply, scheme, changes, reason_part):
    receipt = apply(scheme, **changes)

    assert any(reason_part in reason for reason in receipt.unproven)
    assert verdict_of(scheme, receipt).verdict is Verdict.INCONCLUSIVE


def _move_routes(state):
    for table in ("1001", "1002"):
        state["tables"][table] = {prefix: ["ctsw2"] for prefix in state["tables"][table]}


def _even_shares(state):
    state["tables"]["1000"] = {prefix: ["ctsw1", "ctsw2"] for prefix in state["tables"]["1000"]}


def _change(part, **fields):
    def change(state):
        for entry in state[part] if isinstance(state[part], list) else state[part].values():
            entry.update(fields)

    return change


def _match_less(state):
    for rule in state["mark_rules"]:
        rule[0]["match"]["right"]["set"].pop()


def _mark_alike(state):
    for rule in state["mark_rules"]:
        rule[1]["mangle"]["value"]["map"]["data"]["set"] = [[0, 1001], [1, 1001]]


def _put(part, value):
    return lambda state: state.update({part: value})


@pytest.mark.parametrize(
    ("scheme", "overwritten", "reason_part"),
    [
        ("static-parity", _move_routes, "in table 1001 goes by ctsw2; the scheme expects ctsw1"),
        ("e-ecmp", _move_routes, "in table 1001 goes by ctsw2; the scheme expects ctsw1"),
        ("pinned", _change("rules", priority=40000), "8 of 8 rules of the scheme missing"),
        ("e-ecmp", _put("draws", [[2, 5]]), "marks are drawn by mod 2 seed 5; the scheme expects mod 2 seed 1"),
        ("e-ecmp", _put("draws", []), "marks are drawn by no statement; the scheme expects mod 2 seed 1"),
        ("spray", _put("draws", [[1, None]]), "marks are drawn by mod 1; the scheme expects mod 2"),
        ("e-ecmp", _match_less, 'rtsw1: nftables rule 1 of the scheme changed while the workload ran: {"match"'),
        ("spray", _match_less, 'rtsw1: nftables rule 1 of the scheme changed while the workload ran: {"match"'),
        ("e-ecmp", _mark_alike, '{"set": [[0, 1001], [1, 1001]]}'),
        ("spray", _put("mark_rules", []), "became nothing"),
        ("resilient", _change("groups", buckets=8), "goes by 8 buckets over ctsw1, ctsw2; the scheme expects 128 b"),
        (
            "resilient",
            _change("groups", ports=["ctsw1"]),
            "goes by 128 buckets over ctsw1; the scheme expects 128 bucke",
        ),
        (
            "weighted",
            _even_shares,
            "goes by ctsw1, ctsw2; the scheme expects ctsw1 weight 3, ctsw2",
        ),
    ],
)
def test_routing_scheme_that_somebody_overwrote_while_the_workload_ran_is_inconclusive(
    apply, scheme, overwritten, reason_part
):
    """Rules and routes were all there, but led elsewhere; the holder and the counters did not show it."""
    receipt = apply(scheme, overwritten=overwritten)

    assert receipt.decisions.wrong == ()
    assert any(reason_part in reason for reason in receipt.unproven), receipt.unproven
    assert verdict_of(scheme, receipt).verdict is Verdict.INCONCLUSIVE


FOREIGN = Deviation(switch="rtsw1", cause="foreign", what="2 of 8 rules of the scheme were missing", begin_ns=1)
LOST = "BGP had no next hop by ctsw2 to 1 prefix, and no fault at that place explains it"
WORKLOAD = WorkloadTime(begin_ns=10**9, t0_ns=2 * 10**9, end_ns=60 * 10**9)


def lost(port, prefix_at, begin_s, end_s, switch="rtsw1"):
    """A next hop that BGP had lost to the n-th prefix of another rack."""
    prefix = list(scheme_tables(TOPOLOGY, "pinned", Routing()).switches[switch].hops)[prefix_at]
    return Deviation(
        switch=switch, cause="bgp", what=f"BGP had no next hop by {port}", begin_ns=int(begin_s * 1e9),
        end_ns=int(end_s * 1e9), port=port, prefix=prefix,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("deviation", "reason"),
    [
        (
            replaced(FOREIGN, begin_ns=int(14.3e9), end_ns=int(16.4e9)),
            "rtsw1, from 12.3 s to 14.4 s of the run: 2 of 8 rules of the scheme were missing",
        ),
        (
            replaced(FOREIGN, begin_ns=int(14.3e9)),
            "rtsw1, from 12.3 s of the run until the scheme was removed: 2 of 8 rules of the scheme were missing",
        ),
        (
            lost("ctsw2", 0, 5, 9),
            f"rtsw1, from 3.0 s to 7.0 s of the run: {LOST}",
        ),
        (
            replaced(FOREIGN, cause="unwatched", what="dropped", begin_ns=int(4e9), end_ns=int(4.01e9)),
            "rtsw1, from 2.0 s to 2.0 s of the run: the scheme was not watched: dropped",
        ),
    ],
)
def test_routing_scheme_changed_and_put_back_while_the_workload_ran_is_inconclusive(apply, deviation, reason):
    """Before and after the workload, everything was as it should be, and the measurements were of another scheme."""
    receipt = apply("pinned", deviations=(deviation,), workload=WORKLOAD)

    assert receipt.unproven == (reason,)
    assert [one.switch for one in receipt.deviations] == ["rtsw1"]
    verdict = verdict_of("pinned", receipt)
    assert verdict.verdict is Verdict.INCONCLUSIVE
    assert reason in next(check.detail for check in verdict.checks if check.name == "routing.pinned")
    assert decode(encode(verdict)).routing.deviations == receipt.deviations


@pytest.mark.parametrize(
    ("deviation", "count"),
    [
        (replaced(FOREIGN, begin_ns=0, end_ns=int(0.9e9)), 0),
        (replaced(FOREIGN, begin_ns=int(60.5e9)), 0),
        (replaced(FOREIGN, begin_ns=int(14.3e9), end_ns=int(14.5e9)), 1),
    ],
)
def test_deviation_outside_the_workload_or_of_an_instant_leaves_the_scheme_proved(apply, deviation, count):
    receipt = apply("pinned", deviations=(deviation,), workload=WORKLOAD)
    assert receipt.unproven == ()
    assert len(receipt.deviations) == count


def test_deviations_of_an_instant_that_add_up_make_the_scheme_unproven(apply):
    """A program that changes a rule for 0.2 s, again and again, decided on half of the packets."""
    instants = tuple(replaced(FOREIGN, begin_ns=at * 10**8, end_ns=(at + 2) * 10**8) for at in range(100, 140, 4))
    receipt = apply("pinned", deviations=instants, workload=WORKLOAD)
    assert receipt.unproven == ("rtsw1: 10 deviations of less than 0.25 s each took 2.0 s in all",)
    assert verdict_of("pinned", receipt).verdict is Verdict.INCONCLUSIVE


def test_deviation_of_a_run_without_workload_time_counts_from_the_application(apply):
    (reason,) = apply("pinned", deviations=(replaced(FOREIGN, begin_ns=10**9 + 1, end_ns=3 * 10**9 + 1),)).unproven
    assert reason.startswith("rtsw1, from 1.0 s to 3.0 s after the scheme was applied: ")


@pytest.mark.parametrize(
    ("kind", "target", "loss", "is_explained"),
    [
        ("link.flap", "rtsw1:ctsw1", lost("ctsw1", 0, 10.2, 14), True),
        ("link.flap", "rtsw1:ctsw1", lost("ctsw1", 0, 17, 20), True),  # sessions are established anew
        ("link.flap", "rtsw1:ctsw1", lost("ctsw1", 0, 23, 25), False),  # long after it
        ("link.flap", "rtsw1:ctsw1", lost("ctsw1", 0, 8, 14), False),  # before it
        ("link.flap", "rtsw1:ctsw1", lost("ctsw2", 0, 10.2, 14), False),  # by another uplink
        ("link.flap", "rtsw2:ctsw1", lost("ctsw1", 0, 10.2, 14), True),  # the far half of the path
        ("link.flap", "rtsw3:ctsw1", lost("ctsw1", 0, 10.2, 14), False),  # to another rack
        ("switch.bgp-kill", "ctsw1", lost("ctsw1", 0, 10.2, 14), True),
        ("switch.bgp-kill", "ctsw2", lost("ctsw1", 0, 10.2, 14), False),
        ("switch.bgp-kill", "rtsw2", lost("ctsw2", 0, 10.2, 14), True),  # it withdraws its prefixes
        ("rnic.reset", "host3:rxe0", lost("ctsw1", 0, 10.2, 14), True),
        ("rnic.reset", "host4:rxe0", lost("ctsw1", 0, 10.2, 14), False),
        ("link.down", "host3:rxe0", lost("ctsw1", 0, 10.2, 14), True),
        ("switch.hash-policy", "rtsw1", lost("ctsw1", 0, 10.2, 14), False),  # this one and the others touch no session
        ("packet.mark", "rtsw1:ctsw1", lost("ctsw1", 0, 10.2, 14), False),
        ("packet.drop", "host3:rxe0", lost("ctsw1", 0, 10.2, 14), False),
        ("host.cpu-steal", "host3", lost("ctsw1", 0, 10.2, 14), False),
        ("gpu.throttle", "host3:gpu0", lost("ctsw1", 0, 10.2, 14), False),
    ],
)
def test_next_hops_that_bgp_lost_are_explained_by_a_fault_on_their_path_alone(apply, kind, target, loss, is_explained):
    """A scheme follows BGP while a path is dead; a BGP session that expired on a busy machine looks the same."""
    fault = FaultTime(name="f", kind=kind, target=resolve(TOPOLOGY, target), begin_ns=10 * 10**9, end_ns=12 * 10**9)
    receipt = apply("pinned", deviations=(loss,), workload=dataclasses.replace(WORKLOAD, faults=(fault,)))

    assert [one.fault for one in receipt.deviations] == ["f" if is_explained else ""]
    assert (receipt.unproven == ()) is is_explained
    detail = next(check.detail for check in verdict_of("pinned", receipt).checks if check.name == "routing.pinned")
    assert ("BGP lost next hops because of f" in detail) is is_explained


SETTING = dataclasses.replace(
    replaced(FOREIGN, begin_ns=0, end_ns=0), cause="setting", what="net.ipv4.fib_multipath_hash_policy was 0, not 1"
)


@pytest.mark.parametrize(
    ("kind", "target", "begin_s", "end_s", "is_explained"),
    [
        ("switch.hash-policy", "rtsw1", 9.5, 14.5, True),
        ("switch.hash-policy", "rtsw1", 9.5, 30.0, False),  # not put back with the fault
        ("switch.hash-policy", "rtsw1", 9.5, None, False),
        ("switch.hash-policy", "rtsw1", 2.5, 14.5, False),
        ("switch.hash-policy", "rtsw2", 9.5, 14.5, False),
        ("link.down", "rtsw1:ctsw1", 9.5, 14.5, False),
    ],
)
def test_setting_of_ecmp_that_differed_is_explained_by_the_fault_that_changes_it(
    apply, kind, target, begin_s, end_s, is_explained
):
    """The hash policy went 1, 0, 1 under a scheme, and nothing was recorded."""
    end_ns = None if end_s is None else int(end_s * 10**9)
    deviation = dataclasses.replace(SETTING, begin_ns=int(begin_s * 10**9), end_ns=end_ns)
    fault = FaultTime(name="f", kind=kind, target=resolve(TOPOLOGY, target), begin_ns=10 * 10**9, end_ns=14 * 10**9)
    receipt = apply("pinned", deviations=(deviation,), workload=dataclasses.replace(WORKLOAD, faults=(fault,)))
    assert [one.fault for one in receipt.deviations] == ["f" if is_explained else ""]
    assert (receipt.unproven == ()) is is_explained
    assert verdict_of("pinned", receipt).verdict is (Verdict.PASS if is_explained else Verdict.INCONCLUSIVE)


def test_next_hops_that_bgp_lost_by_one_port_at_one_time_are_one_deviation(apply):
    losses = (lost("ctsw1", 0, 10, 14), lost("ctsw1", 1, 10.1, 15), lost("ctsw1", 0, 20, 21), lost("ctsw2", 0, 10, 14))
    deviations = apply("pinned", deviations=losses, workload=WORKLOAD).deviations
    assert [(one.from_s, one.to_s, one.what) for one in deviations] == [
        (8.0, 13.0, "BGP had no next hop by ctsw1 to 2 prefixes"),
        (8.0, 12.0, "BGP had no next hop by ctsw2 to 1 prefix"),
        (18.0, 19.0, "BGP had no next hop by ctsw1 to 1 prefix"),
    ]


def test_many_deviations_are_counted(apply):
    times = range(10, 30, 2)
    deviations = tuple(replaced(FOREIGN, begin_ns=at * 10**9, end_ns=(at + 1) * 10**9) for at in times)
    unproven = apply("pinned", deviations=deviations, workload=WORKLOAD).unproven
    assert len(unproven) == 6
    assert unproven[-1] == "5 more deviations from the scheme (`routing.deviations` in verdict.json)"


def test_fault_times_are_those_of_armed_faults():
    (planned,) = plan_all(
        [FaultSpec(id="uplink", kind="link.flap", target="rtsw1:ctsw1", for_s=2.0)], TOPOLOGY, lab_kind="soft"
    )
    receipt = SimpleNamespace(armed=Armed(ok=True, at_ns=7), edges=((5, True), (8, False)), cleared=Cleared(at_ns=9))
    (time,) = fault_times([planned], {"uplink": receipt})
    assert (time.name, time.target, time.begin_ns, time.end_ns) == ("uplink", planned.target, 5, 9)
    assert fault_times([planned], {}) == ()
    never = SimpleNamespace(armed=Armed(ok=False), edges=(), cleared=Cleared())
    assert fault_times([planned], {"uplink": never}) == ()


def test_routing_scheme_with_another_seed_is_inconclusive(apply):
    """The kernels are queried about packets that have a mark already, so their decisions do not depend on the seed."""
    one = Fabric(routing="e-ecmp", qp_hash_seed=2)
    tables = scheme_tables(TOPOLOGY, "e-ecmp", one.as_routing)
    lab = Switches()
    lab.obeys = scheme_tables(TOPOLOGY, "e-ecmp", Routing(seed=3))
    assert any(
        "mod 2 seed 3; the scheme expects mod 2 seed 2" in reason for reason in query_decisions(lab, tables).wrong
    )
    lab.obeys = tables
    assert query_decisions(lab, tables).wrong == ()


def test_resilient_group_whose_buckets_do_not_divide_evenly_is_proved():
    """The kernel gives two of three buckets to one of two next hops; half of the packets were expected there."""
    lab, tables = Switches(), scheme_tables(TOPOLOGY, "resilient", Routing(buckets=3))
    lab.obeys = tables
    assert query_decisions(lab, tables).wrong == ()


def test_routes_that_the_agent_has_not_copied_yet_are_read_again(apply):
    """BGP has changed a moment ago: the first reading shows its former next hops in the scheme's table."""
    readings = []

    def withdrawn(state):
        readings.append(state)
        if len(readings) <= 3:
            state["tables"]["1000"] = {prefix: ["ctsw1"] for prefix in state["tables"]["1000"]}

    assert apply("weighted", overwritten=withdrawn).unproven == ()


@pytest.mark.parametrize("scheme", ["ecmp", "static-parity", "weighted"])
def test_routing_decisions_that_are_missing_prove_nothing(scheme, monkeypatch):
    """A single answer of four that happened to agree used to be enough."""
    lab = Switches()
    tables = scheme_tables(TOPOLOGY, scheme, Routing())
    lab.obeys = tables if tables.scheme.has_tables else None
    assert query_decisions(lab, tables).wrong == ()
    send = lab.request

    def truncated(machine, request):
        answer = send(machine, request)
        if "decisions" not in answer:
            return answer
        return {"decisions": {node: each[:-3] for node, each in answer["decisions"].items()}}

    monkeypatch.setattr(lab, "request", truncated)
    assert any("kernel answered" in finding for finding in query_decisions(lab, tables).wrong)


def test_routing_weights_the_kernel_does_not_keep_are_reported(apply, monkeypatch):
    monkeypatch.setattr(Switches, "decide", lambda self, _node, flow: ["ctsw1" if flow[3] % 2 else "ctsw2", 1000])

    assert any(
        "ctsw1 gets 50% of the sample packets; the scheme expects 75%" in one for one in apply("weighted").unproven
    )


def test_kernel_with_one_next_hop_does_no_ecmp(apply, monkeypatch):
    monkeypatch.setattr(Switches, "decide", lambda *_: ["ctsw1", 254])

    assert any("ctsw2 gets 0% of the sample packets" in one for one in apply("ecmp").unproven)


def test_routing_scheme_never_applied_is_inconclusive():
    verdict = verdict_of("spray", None)

    assert verdict.verdict is Verdict.INCONCLUSIVE
    assert "it was never applied" in next(check.detail for check in verdict.checks if check.name == "routing.spray")


def test_routing_scheme_refused_by_a_switch_ends_the_run_with_its_error(apply):
    with pytest.raises(FaultError, match="rule of priority 1000"):
        apply("pinned", refuses=True)


def test_routing_scheme_possibly_left_behind_makes_the_lab_dirty(apply):
    assert routing_scheme.not_removed(apply("pinned")) == ()
    assert "routing scheme pinned not removed: a rule is left; run `faultbed heal`" in routing_scheme.not_removed(
        apply("pinned", releases=False)
    )


def passes(lab, folder, journal):
    """Return a run under the scheme `pinned`: its twin, and its measured pass, whose counters were read."""
    experiment = SimpleNamespace(fabric=fabric_of("pinned"), workload=None)
    setting = setting_of(experiment=experiment, lab=lab, journal=journal, run_dir=RunDir(folder), mutations={})
    twin = pass_of("twin", setting=setting)
    measured = pass_of(setting=setting)
    measured.earlier = {"twin": twin}
    measured.readings.before, measured.readings.after, measured.readings.counted_s = BEFORE, AFTER, 10.0
    for run in (twin, measured):
        run.active["routing"] = routing_part.PART.active(run)
    return twin.active["routing"], measured.active["routing"]


@pytest.mark.parametrize("releases", [True, False])
def test_routing_scheme_that_cannot_be_applied_has_a_receipt(monkeypatch, tmp_path, releases):
    """The receipt is not missing and not the twin's. Leftovers of the failed application make the lab DIRTY."""
    monkeypatch.setattr(routing_scheme, "SchemeLease", FakeSchemeLease)
    lab = Switches()
    with Journal(tmp_path / "journal.jsonl") as journal:
        twin, measured = passes(lab, tmp_path, journal)
        with twin.around():
            pass
        assert twin.sealed().cleared.ok is True
        lab.refuses, lab.releases = True, releases
        with pytest.raises(FaultError, match="rule of priority 1000"), measured.around():
            pytest.fail("no workload runs without its scheme")
    assert measured.sealed().unproven[0].startswith("not applied: rtsw1: a rule of priority 1000")
    assert (measured.left() == ()) is releases


@pytest.mark.parametrize("obeyed", [True, False])
def test_routing_scheme_that_did_not_route_the_twin_proves_nothing(monkeypatch, tmp_path, obeyed):
    """The run had its scheme, but its twin was routed otherwise, so they cannot be compared."""
    monkeypatch.setattr(routing_scheme, "SchemeLease", FakeSchemeLease)
    with Journal(tmp_path / "journal.jsonl") as journal:
        twin, measured = passes(Switches(), tmp_path, journal)
        mutations = twin._run.setting.mutations
        mutations.update({} if obeyed else {"routing": "lie"})
        with twin.around():
            pass
        mutations.clear()
        with measured.around():
            pass
    receipt = measured.sealed()
    assert receipt.armed.ok is True
    assert receipt.decisions.wrong == ()
    if obeyed:
        assert receipt.unproven == ()
    else:
        assert receipt.unproven[0].startswith("fault-free twin: rtsw1 to 10.77.")
        assert verdict_of("pinned", receipt).verdict is Verdict.INCONCLUSIVE


def test_routing_scheme_removed_while_the_twin_ran_proves_nothing(monkeypatch, tmp_path):
    """The holder stayed alive, and the rules used not to be read at the end of the twin."""
    monkeypatch.setattr(routing_scheme, "SchemeLease", FakeSchemeLease)
    lab = Switches()
    with Journal(tmp_path / "journal.jsonl") as journal:
        twin, measured = passes(lab, tmp_path, journal)
        with twin.around():
            lab.obeys = None
        with measured.around():
            pass
    assert measured.sealed().unproven[0] == (
        "fault-free twin: rtsw1: 8 of 8 rules of the scheme missing at the end of the workload"
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_routing_scheme_is_removed_from_every_machine_when_one_removal_is_interrupted(monkeypatch, tmp_path, error):
    released = []

    class Interrupted(FakeSchemeLease):
        def release(self):
            machine = self.planned.place.node
            released.append(machine)
            if machine == "vm-rtsw2":
                raise error
            return super().release()

    monkeypatch.setattr(routing_scheme, "SchemeLease", Interrupted)
    monkeypatch.setattr(Switches, "carrier", lambda _, name: SimpleNamespace(name=f"vm-{name}"))
    with (
        Journal(tmp_path / "journal.jsonl") as journal,
        pytest.raises(type(error)),
        routing_scheme.apply_scheme(Switches(), fabric_of("pinned"), journal) as scheme,
    ):
        pass

    assert set(released) == {"vm-rtsw1", "vm-rtsw2", "vm-rtsw3"}
    assert routing_scheme.not_removed(scheme.receipt()) == (
        "routing scheme pinned not removed: vm-rtsw2: the removal was interrupted; run `faultbed heal`",
    )


def test_least_packets_exceed_what_bgp_sends_by_itself():
    """With `timers bgp 1 3`, keepalives and their ACKs are two packets per second and port."""
    for seconds in (0.0, 1.0, 60.0, 3600.0):
        assert routing_scheme.least_packets(6, seconds) >= 100 + 2 * 6 * seconds


@pytest.mark.parametrize("is_left", [True, False])
@pytest.mark.parametrize("answers", [True, False])
def test_scheme_lease_that_fails_while_applying_reads_back_the_removal(monkeypatch, tmp_path, answers, is_left):
    """The switch refuses half-way. `ok` is the state that the holder, or else the machine itself, shows afterwards."""
    requests = []

    def request(_lease, message):
        requests.append(message["do"])
        if message["do"] == "arm":
            raise FaultError("nft refused")
        if message["do"] == "clear":
            if not answers:
                raise FaultError("the holder has ended")
            error = "a rule is left" if is_left else ""
            return {"ok": not is_left, "at_ns": None, "readback": {}, "error": error, "observed": {"state": "over"}}
        return {}

    monkeypatch.setattr(Lease, "begin", lambda _: None)
    monkeypatch.setattr(Lease, "request", request)
    monkeypatch.setattr(Lease, "has_reverted", lambda _: not is_left)
    lab = SimpleNamespace(
        name="lab", kind="soft", reserved=None, state_dir=tmp_path, netns=lambda name: name,
        carrier=lambda _: SimpleNamespace(name="fabric"),
    )  # fmt: skip
    tables = scheme_tables(TOPOLOGY, "pinned", fabric_of("pinned").as_routing)
    with Journal(tmp_path / "journal.jsonl") as journal:
        lease = SchemeLease(lab, tables, "fabric", journal)
        lease.lease.ttl_s, lease.lease.patience_s = -2.0, 0.0  # end the lease at once
        with pytest.raises(FaultError, match="nft refused"):
            lease.apply()
        release = lease.release()

    assert requests == ["prepare", "arm", "clear"]
    assert (release.ok, release.by) == (not is_left, "holder" if answers else "lease")


def test_scheme_is_not_applied_after_a_heal_that_came_before_its_holder(monkeypatch, tmp_path):
    """Opening the connection and starting the holder takes seconds, in which `heal` finds nothing to end."""
    requests = []

    def begin(_):
        monkeypatch.setattr(interventions, "since_begin", lambda *_: "`faultbed heal` ended the faults of this lab")

    monkeypatch.setattr(Lease, "begin", begin)
    monkeypatch.setattr(Lease, "request", lambda _, message: requests.append(message["do"]))
    lab = SimpleNamespace(
        name="lab", kind="soft", reserved=("*",), state_dir=tmp_path, netns=lambda name: name,
        carrier=lambda _: SimpleNamespace(name="fabric"),
    )  # fmt: skip
    tables = scheme_tables(TOPOLOGY, "pinned", fabric_of("pinned").as_routing)
    with Journal(tmp_path / "journal.jsonl") as journal:
        lease = SchemeLease(lab, tables, "fabric", journal)
        with pytest.raises(interventions.Intervened, match="heal"):
            lease.apply()
    assert requests == ["prepare"]
    assert lease.release().ok


def test_report_lists_when_switches_deviated_from_the_scheme(apply, tmp_path):
    named = replaced(FOREIGN, what=EVIL, begin_ns=int(14.3e9), end_ns=int(16.4e9))
    receipt = apply("pinned", deviations=(named, replaced(named, begin_ns=int(20e9), end_ns=None)), workload=WORKLOAD)
    html = report.render_html(finished(tmp_path, changed(synthetic_run(), routing=receipt)))
    text = " ".join("".join(parsed(html).text).split())

    assert "2 deviations of a switch's routes from the scheme" in text
    assert "another program" in text
    assert "<script>alert(1)" not in html


@pytest.mark.parametrize("is_open", [True, False])
def test_scheme_lease_returns_recorded_deviations_in_controller_time(monkeypatch, tmp_path, is_open):
    recorded = {
        "begin_ns": 100, "end_ns": None if is_open else 200, "cause": "bgp", "what": "w", "port": "ctsw1",
        "prefix": "10.0.0.0/31", "netns": "ns-rtsw2",
    }  # fmt: skip
    monkeypatch.setattr(Lease, "begin", lambda _: None)
    seen = {"state": "over"}
    answer = {"ok": True, "at_ns": 300, "readback": {"deviations": [recorded]}, "observed": seen}
    monkeypatch.setattr(Lease, "request", lambda *_: answer)
    lab = SimpleNamespace(
        name="lab", kind="soft", reserved=None, state_dir=tmp_path, netns=lambda name: f"ns-{name}",
        carrier=lambda _: SimpleNamespace(name="fabric"),
    )  # fmt: skip
    tables = scheme_tables(TOPOLOGY, "pinned", fabric_of("pinned").as_routing)
    with Journal(tmp_path / "journal.jsonl") as journal:
        lease = SchemeLease(lab, tables, "fabric", journal)
        lease.lease.offset = ClockOffset(offset_ns=7, error_ns=0)
        lease.apply()
        (deviation,) = lease.release().deviations
    to_controller = lease.lease.offset.to_controller
    assert (deviation.switch, deviation.port, deviation.begin_ns) == ("rtsw2", "ctsw1", to_controller(100))
    assert deviation.end_ns == (None if is_open else to_controller(200))


def test_report_names_the_routing_scheme_and_why_it_is_not_proved(apply, tmp_path):
    receipt = replace(apply("e-ecmp"), unproven=(EVIL,))
    html = report.render_html(finished(tmp_path, changed(synthetic_run(), routing=receipt)))
    text = " ".join("".join(parsed(html).text).split())

    queried = f"{receipt.decisions.agreed} of {receipt.decisions.queried} queried decisions of the switches' kernels"
    assert f"e-ecmp (emulated, qp_hash_seed 1): before the workload, {queried}" in text
    assert "agreed with the scheme; 1,200 packets were marked" in text
    assert "Not proved: <script>" in text
    assert "<script>alert(1)" not in html
    assert "queue pairs and their paths" in text
