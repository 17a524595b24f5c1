"""Effective bisection: permutations that cross one tier, the interval of several, and inconclusive results."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from types import SimpleNamespace

import house
import numpy as np
import pytest
from click.testing import CliRunner
from fake_switches import FakeSchemeLease, Switches
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_run import soft_topology

from faultbed.harness.analysis.links.effective_bisection import Trial, bisection_of
from faultbed.harness.cli.main import cli
from faultbed.harness.cli.traffic import bisecting
from faultbed.harness.confidence import LEVEL, level_for
from faultbed.harness.experiment.fabric_file import Fabric
from faultbed.harness.live.routing import routing_scheme
from faultbed.harness.run import bisection_run, ends
from faultbed.harness.run.bisection_run import Bisection, BisectionSpec, judge_tier
from faultbed.harness.verdict import Verdict
from faultbed.testbed.errors import DirtyLab, Interrupted, LabError, UsageError
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.tenancy import dirty
from faultbed.testbed.tenancy.dirty import Outcome
from faultbed.traffic.flows.permutations import permutation, tiers_of

ZONES = lab_inventory.load(house.HOUSE / "inventory" / "soft-zones.yml").topology


def trials(*ratios, flows=8, solo=6e6):
    return [Trial(flows=flows, aggregate_bps=one * flows * solo, solo_bps=solo) for one in ratios]


def test_bisection_tiers_are_those_all_rnics_can_cross():
    assert tiers_of(ZONES) == ("zone", "fabric"), "one host a rack: none has a partner in its rack"
    assert tiers_of(soft_topology()) == ("rack", "zone")
    lone = replace(soft_topology(), hosts=soft_topology().hosts[:3])
    assert tiers_of(lone) == (), "the third host has a rack of its own, and half of the RNICs are too few"
    with pytest.raises(
        UsageError, match="no permutation of all RNICs crosses the tier fabric; choose one of rack, zone"
    ):
        permutation(soft_topology(), "fabric", seed=1, number=0)


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 1000), st.sampled_from(["rack", "zone", "fabric"]))
def test_permutation_sends_once_from_each_rnic_and_crosses_its_tier(seed, number, tier):
    topology = ZONES if tier == "fabric" else soft_topology()
    pairs = permutation(topology, tier, seed=seed, number=number)
    every = {f"{host.name}:{rnic.name}" for host in topology.hosts for rnic in host.rnics}
    assert {src for src, _ in pairs} == {dst for _, dst in pairs} == every
    assert len(pairs) == len(every)
    place = {host.name: host for host in topology.hosts}
    for pair in pairs:
        src, dst = (place[end.partition(":")[0]] for end in pair)
        assert src.name != dst.name
        assert (src.zone == dst.zone) == (tier != "fabric")
        assert (src.rack == dst.rack) == (tier == "rack")


def test_permutations_depend_on_seed_and_number():
    actual = [permutation(ZONES, "fabric", seed=3, number=number) for number in range(20)]
    assert actual == [permutation(ZONES, "fabric", seed=3, number=number) for number in range(20)]
    assert len(set(actual)) > 10
    assert actual != [permutation(ZONES, "fabric", seed=4, number=number) for number in range(20)]


def test_permutation_exists_for_a_rack_with_half_of_the_rnics():
    """All RNICs of this rack must send to other racks, which few of all permutations do."""
    hosts = soft_topology().hosts
    wide = replace(hosts[0], rnics=tuple(replace(hosts[0].rnics[0], name=f"rxe{n}") for n in range(12)))
    others = [replace(host, rack=f"rack{n + 2}", rnics=wide.rnics[:4]) for n, host in enumerate(hosts[1:])]
    topology = replace(soft_topology(), hosts=(wide, *others))
    pairs = permutation(topology, "zone", seed=1, number=0)
    assert len({dst for _, dst in pairs}) == 24


def test_bisection_is_a_median_with_an_interval_from_eight_trials():
    assert bisection_of([]) == (None, None)
    value, interval = bisection_of(trials(0.9, 0.4))
    assert (value, interval) == (pytest.approx(0.65), None)
    assert bisection_of(trials(*[0.36] * 7))[1] is None
    value, interval = bisection_of(trials(*(0.35 + 0.001 * number for number in range(9))))
    assert (value, interval.low, interval.high) == (pytest.approx(0.354), pytest.approx(0.35), pytest.approx(0.358))
    assert bisection_of([*trials(0.3, 0.3), Trial(flows=8, aggregate_bps=0.0, solo_bps=1.0)]) == (None, None)


def test_bisection_that_one_permutation_in_ten_halves_is_no_pass_at_its_median():
    """Five permutations, of which 90 % were full and 10 % half, used to be PASS in 60 % of cases."""
    rng = np.random.default_rng(1)
    verdicts = [
        judge_tier(
            "zone", trials(*np.where(rng.random(9) < 0.1, 0.5, 1.0 + 0.01 * rng.normal(size=9))), 0.8, least=1.0,
            limit="", level=LEVEL,
        ).verdict
        for _ in range(400)
    ]  # fmt: skip
    assert max(verdicts.count(Verdict.PASS), verdicts.count(Verdict.FAIL)) <= 10


@pytest.mark.parametrize(
    ("ratios", "least", "limit", "verdict"),
    [
        ((0.95, 0.96, 0.97) * 3, None, "", Verdict.PASS),
        ((0.95, 0.96, 0.97) * 3, 0.5, "", Verdict.PASS),
        ((0.95, 0.96, 0.97), 0.5, "", Verdict.INCONCLUSIVE),
        ((0.35, 0.36, 0.355, 0.352) * 2, 0.9, "", Verdict.FAIL),
        ((0.95, 0.96), None, "", Verdict.INCONCLUSIVE),
        ((0.95, 0.96, 0.97), None, "50 of 60 Mb/s", Verdict.INCONCLUSIVE),
        ((), None, "no rates", Verdict.INCONCLUSIVE),
    ],
)
def test_bisection_tier_is_judged_by_its_interval(ratios, least, limit, verdict):
    result = judge_tier("zone", trials(*ratios), 0.8, least=least, limit=limit, level=LEVEL)
    assert result.verdict is verdict
    if limit:
        assert (result.value, result.interval, result.utilisation, result.detail) == (None, None, None, limit)


def test_bisection_with_a_flow_of_which_nothing_arrived_is_inconclusive():
    """The fifteen others got 0.94 of what sixteen should get, and the bound of 0.9 held."""
    dead = replace(trials(0.94, flows=16)[0], silent=("host1:rxe0 > host3:rxe0",))
    result = judge_tier("zone", [*trials(0.95, 0.951, flows=16), dead], 0.8, least=0.9, limit="", level=LEVEL)
    assert (result.verdict, result.value, result.interval) == (Verdict.INCONCLUSIVE, None, None)
    assert result.detail == "nothing came through on host1:rxe0 > host3:rxe0 in its permutation (1 such)"


def test_bisection_of_a_lab_without_rates_is_inconclusive_and_touches_nothing(monkeypatch, tmp_path):
    """Without rates, n flows share the CPU of the machine, so no number is printed."""
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path))
    monkeypatch.setattr("faultbed.testbed.backends.soft.lifecycle.up", lambda *_: pytest.fail("the lab was touched"))
    done = CliRunner().invoke(cli, ["--lab", "soft", "bisection", "--json"], standalone_mode=False)
    output = json.loads(done.stdout)
    assert (done.return_value, output["verdict"]) == (2, "INCONCLUSIVE")
    assert [(one["tier"], one["value"]) for one in output["tiers"]] == [("rack", None), ("zone", None)]
    assert "use a lab with faultbed_rate_scale, such as soft-zones" in output["tiers"][0]["detail"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lab", "soft-mini", "bisection", "--tier", "zone"], "no permutation of all RNICs of soft-mini crosses it"),
        (["--lab", "soft", "bisection", "--size", "big"], "--size big"),
    ],
)
def test_bisection_rejects_what_the_lab_lacks(words, message):
    assert message in str(CliRunner().invoke(cli, words, standalone_mode=False).exception)


@pytest.mark.parametrize(
    ("error", "raised", "state"),
    [
        (LabError("a flow failed"), LabError, "CLEAN"),
        (LabError("a flow failed"), DirtyLab, "DIRTY"),
        (KeyboardInterrupt(), Interrupted, "CLEAN"),
        (KeyboardInterrupt(), Interrupted, "DIRTY"),
    ],
)
def test_bisection_that_ends_early_compares_the_lab_and_reports_its_state(monkeypatch, error, raised, state):
    output = f"the lab is {state}"
    monkeypatch.setattr(dirty, "begin", lambda *_, **__: "work")
    monkeypatch.setattr(ends, "finish", lambda *_, **__: Outcome(state=state, reasons=(), sentence=output))

    def fails(*_):
        raise error

    monkeypatch.setattr(bisection_run, "_emulation_limit", fails)
    spec = BisectionSpec(tiers=("zone",), permutations=3, seed=1, seconds=1.0, qps=1, message_bytes=4096)
    with pytest.raises(raised) as caught:
        bisection_run.measure(None, spec, lambda _: None)
    if raised is not LabError:
        assert output in str(caught.value)
    if raised is Interrupted:
        assert caught.value.exit_code == (5 if state == "DIRTY" else 3)


def test_bisection_interrupted_while_the_lab_is_compared_reports_its_state(monkeypatch):
    """The scheme is still on the switches. The command used to end with 3 and without the reason."""
    looks = iter(
        [KeyboardInterrupt(), Outcome(state="DIRTY", reasons=(), sentence="the lab is DIRTY: a scheme is left")]
    )

    def finish(*_, **__):
        if isinstance(look := next(looks), KeyboardInterrupt):
            raise look
        return look

    monkeypatch.setattr(dirty, "begin", lambda *_, **__: "work")
    monkeypatch.setattr(ends, "finish", finish)
    monkeypatch.setattr(bisection_run, "_emulation_limit", lambda *_: "no rates")
    spec = BisectionSpec(tiers=("zone",), permutations=3, seed=1, seconds=1.0, qps=1, message_bytes=4096)
    with pytest.raises(Interrupted, match="a scheme is left") as caught:
        bisection_run.measure(None, spec, lambda _: None)
    assert caught.value.exit_code == 5


def test_bisection_without_use_of_the_lab_reports_no_lab_state(monkeypatch, tmp_path):
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path))
    monkeypatch.setattr("faultbed.testbed.backends.soft.lifecycle.up", lambda *_: pytest.fail("the lab was touched"))
    done = CliRunner().invoke(cli, ["--lab", "soft", "bisection", "--json"], standalone_mode=False)
    assert json.loads(done.stdout)["lab_state"] is None
    done = CliRunner().invoke(cli, ["--lab", "soft", "bisection"], standalone_mode=False)
    assert done.return_value == 2
    assert "the lab was not used" in done.stdout
    assert "CLEAN" not in done.stdout


@pytest.mark.parametrize(("tiers", "header"), [(2, "99 % interval"), (3, "99.333 % interval")])
@pytest.mark.parametrize("lab_state", ["CLEAN", "DIRTY"])
def test_bisection_table_states_the_level_of_its_intervals(monkeypatch, tmp_path, tiers, header, lab_state):
    """With --min, each tier is a check that can fail by chance, so three tiers need wider intervals than 99 %."""
    names = ("rack", "zone", "fabric")[:tiers]
    results = tuple(
        judge_tier(name, trials(*(0.95, 0.96, 0.97) * 3), 0.8, least=0.5, limit="", level=level_for(tiers))
        for name in names
    )
    holding = SimpleNamespace(heartbeat=lambda: None, refresh=lambda: None)
    lab = SimpleNamespace(kind="soft", name="soft-zones", state_dir=tmp_path)
    monkeypatch.setattr(bisecting, "hold", lambda *_, **__: contextlib.nullcontext(holding))
    monkeypatch.setattr(bisecting, "open_lab", lambda _: contextlib.nullcontext(lab))
    monkeypatch.setattr("faultbed.testbed.backends.soft.lifecycle.up", lambda *_: "already up")
    monkeypatch.setattr("faultbed.testbed.backends.soft.lifecycle.reset", lambda *_, **__: None)
    result = Bisection(tiers=results, lab_state=lab_state)
    monkeypatch.setattr(bisection_run, "measure", lambda *_: result)
    done = CliRunner().invoke(cli, ["--lab", "soft-zones", "bisection", "--min", "0.5"], standalone_mode=False)
    assert header in done.stdout
    assert f"lab {lab_state}" in done.stdout
    assert done.return_value == (5 if lab_state == "DIRTY" else 0)


@pytest.mark.parametrize("state", ["CLEAN", "DIRTY"])
def test_bisection_that_leaves_the_lab_dirty_reports_why(monkeypatch, state):
    outcome = Outcome(state=state, reasons=(), sentence=f"the lab is {state}: host3 has a qdisc; run `faultbed heal`")
    monkeypatch.setattr(dirty, "begin", lambda *_, **__: "work")
    monkeypatch.setattr(ends, "finish", lambda *_, **__: outcome)
    monkeypatch.setattr(bisection_run, "_emulation_limit", lambda *_: "no rates")
    spec = BisectionSpec(tiers=("zone",), permutations=3, seed=1, seconds=1.0, qps=1, message_bytes=4096)
    lines = []
    assert bisection_run.measure(None, spec, lines.append).lab_state == state
    assert lines == ([outcome.sentence] if state == "DIRTY" else [])


@pytest.fixture
def routed(monkeypatch, tmp_path):
    """Return a function that measures bisection under the scheme `pinned`, on switches with these properties."""
    monkeypatch.setattr(dirty, "begin", lambda *_, **__: "work")
    monkeypatch.setattr(bisection_run, "_emulation_limit", lambda *_: "")
    monkeypatch.setattr(routing_scheme, "SchemeLease", FakeSchemeLease)
    readings = (
        {f"rtsw{rack}": {f"ctsw{n}.tx_packets": sent for n in (1, 2)} for rack in (1, 2, 3)} for sent in (0, 999)
    )
    monkeypatch.setattr(bisection_run.counters, "read", lambda _: next(readings))
    spec = BisectionSpec(
        tiers=("zone",), permutations=3, seed=1, seconds=1.0, qps=1, message_bytes=4096, fabric=Fabric(routing="pinned")
    )

    def measure(tier=None, **properties):
        lab = Switches()
        lab.state_dir = tmp_path
        for name, value in properties.items():
            setattr(lab, name, value)
        schemes, left = [], []

        def one_tier(lab, *_):
            schemes.append(lab.scheme)
            return (
                tier()
                if tier
                else judge_tier("zone", trials(*(0.95, 0.96, 0.97) * 3), 0.8, least=None, limit="", level=LEVEL)
            )

        def finish(*_, left=left):
            state = "DIRTY" if tuple(left) else "CLEAN"
            return Outcome(state=state, reasons=tuple(left), sentence=" ".join(left))

        monkeypatch.setattr(bisection_run, "_measure_tier", one_tier)
        monkeypatch.setattr(ends, "finish", lambda *_, left=(), **__: finish(left=left))
        result = bisection_run.measure(lab, spec, lambda _: None)
        assert lab.scheme is None
        assert [scheme.scheme.name for scheme in schemes] == ["pinned"]
        return result

    return measure


def test_bisection_under_a_routing_scheme_has_its_receipt(routed):
    result = routed()
    assert (result.tiers[0].verdict, result.lab_state) == (Verdict.PASS, "CLEAN")
    assert (result.routing.scheme, result.routing.unproven) == ("pinned", ())
    assert result.routing.carried_packets == 6 * 999


def test_bisection_under_a_scheme_that_is_not_applied_is_inconclusive(routed, monkeypatch):
    """No-op mutation: the switches go on with ECMP."""

    class Noop(FakeSchemeLease):
        def __init__(self, *args, **_):
            super().__init__(*args, mutate="noop")

    monkeypatch.setattr(routing_scheme, "SchemeLease", Noop)
    result = routed()
    assert result.tiers[0].verdict is Verdict.INCONCLUSIVE
    assert "routing scheme pinned is not proven: not applied" in result.tiers[0].detail


@pytest.mark.parametrize(
    ("properties", "why"),
    [({"holds": False}, "no longer applied"), ({"empties": True}, "routes of the scheme missing")],
)
def test_bisection_under_a_scheme_that_ends_early_is_inconclusive(routed, properties, why):
    result = routed(**properties)
    assert result.tiers[0].verdict is Verdict.INCONCLUSIVE
    assert why in result.tiers[0].detail


def test_bisection_whose_scheme_is_not_removed_leaves_the_lab_dirty(routed):
    result = routed(releases=False)
    assert result.lab_state == "DIRTY"
    assert result.tiers[0].verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("releases", [True, False])
def test_bisection_ended_by_an_error_removes_its_scheme_and_reports_what_is_left(routed, releases):
    def fails():
        raise LabError("a flow failed")

    with pytest.raises(DirtyLab if not releases else LabError, match="a flow failed") as caught:
        routed(tier=fails, releases=releases)
    assert ("routing scheme pinned not removed" in str(caught.value)) is not releases


def test_bisection_rejects_a_scheme_that_the_lab_cannot_have():
    done = CliRunner().invoke(
        cli, ["--lab", "soft-mini", "bisection", "--routing", "pinned", "--tier", "rack"], standalone_mode=False
    )
    assert "--routing: pinned: no switch of this lab has two next hops" in str(done.exception)
