"""The search finds, shrinks and stores a planted defect, and distinguishes failures from runs that prove nothing."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import tomllib
from dataclasses import replace

import click
import hypothesis
import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, Phase, given, settings
from samples import samples

from faultbed.harness.cli.experiments import fuzzing
from faultbed.harness.cli.main import cli
from faultbed.harness.experiment import experiment_file as experiment
from faultbed.harness.experiment.declare.section import fields_of, read_fields
from faultbed.harness.experiment.workload_file import Collective, Flow
from faultbed.harness.fuzz import draw
from faultbed.harness.fuzz.case import Case, duration_s, to_toml
from faultbed.harness.fuzz.kinds import kinds_named
from faultbed.harness.fuzz.on_lab import keep
from faultbed.harness.fuzz.outcome import Outcome, outcome_of
from faultbed.harness.fuzz.search import Search
from faultbed.harness.run.prepare.resolve import refusal, resolve
from faultbed.harness.verdict import Check, Verdict, VerdictFile
from faultbed.inject.evidence.receipt import Armed, Cleared, Fired, Receipt
from faultbed.inject.kinds.catalogue import CATALOGUE
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.testbed.errors import LabError, Unsupported, UsageError
from faultbed.testbed.inventory import lab_inventory as inventory
from faultbed.testbed.inventory.schema import SafetyVars
from faultbed.testbed.shipped import inventories

MINI = inventory.load(inventories() / "soft-mini.yml")
ALL = kinds_named((), "soft")
FAST = draw.ON_LAB
PASSED = Outcome(verdict="PASS", failures={})


@functools.cache
def strategy(*, kinds=("link.down", "packet.drop", "gpu.xid"), workloads=("collective",), may_disrupt=None, most=4):
    """Return a strategy of cases for a lab whose owner allows all faults, or only short ones on some nodes."""
    safety = None if may_disrupt is None else SafetyVars(may_disrupt=[*may_disrupt], longest_fault_s=2.0)
    return draw.cases(replace(MINI, safety=safety), kinds=kinds, workloads=workloads, most=most)


def host_of(fault):
    return next(part for part in fault.target.split(":") if part.startswith(("host", "ctsw")))


def overlap_on_one_host(case):
    """The planted defect: a link that is down while packets of the same host are dropped elsewhere."""
    downs = [fault for fault in case.faults if fault.kind == "link.down"]
    drops = [fault for fault in case.faults if fault.kind == "packet.drop"]
    return any(
        host_of(down) == host_of(drop) and down.at_s < drop.at_s + drop.for_s and drop.at_s < down.at_s + down.for_s
        for down in downs
        for drop in drops
    )


class Fake:
    """A stand-in lab. A case fails each check whose predicate holds for it."""

    def __init__(self, **defects):
        self.defects, self.cases = defects, []

    def __call__(self, case):
        self.cases.append(case)
        failures = {name: "planted" for name, holds in self.defects.items() if holds(case)}
        return Outcome(verdict="FAIL", failures=failures) if failures else PASSED


def search(tmp_path, run, *, runs=2000, seed=1, until=1, **kwargs):
    """Run a search that ends after `runs` runs, or at failure number `until`."""
    made = Search(
        strategy=strategy(**kwargs), run=run,
        may_run=lambda: len(made.tried) < runs and len(made.failures) < until,
        database=tmp_path / "db", key="test", seed=seed, progress=lambda _: None,
    )  # fmt: skip
    return made


@pytest.fixture(scope="module")
def overlap(tmp_path_factory):
    """Return a search that found and shrank the planted defect, and its folder."""
    folder = tmp_path_factory.mktemp("overlap")
    made = search(folder, Fake(workload=overlap_on_one_host))
    made.go()
    return made, folder


def test_search_planted_overlap_is_shrunk_to_two_short_faults(overlap):
    (failure,) = overlap[0].failures
    assert sorted(fault.kind for fault in failure.smallest.faults) == ["link.down", "packet.drop"]
    assert {(fault.at_s, fault.for_s) for fault in failure.smallest.faults} == {(FAST.earliest_s, FAST.shortest_s)}
    drop = next(fault for fault in failure.smallest.faults if fault.kind == "packet.drop")
    assert drop.params == {"share": 0.001}
    assert failure.checks == ("workload",)
    assert failure.is_smallest
    assert failure.fails_again
    assert len(failure.first.faults) >= 2


def test_search_intensity_and_time_are_shrunk_to_the_least_that_fails(tmp_path):
    """A defect that needs a share of 0.25 for two seconds shrinks to exactly these values."""

    def strong(case):
        return any(f.kind == "packet.drop" and f.params["share"] >= 0.25 and f.for_s >= 2 for f in case.faults)

    made = search(tmp_path, Fake(workload=strong))
    made.go()
    ((fault,),) = (failure.smallest.faults for failure in made.failures)
    assert (fault.at_s, fault.for_s, fault.params["share"]) == (FAST.earliest_s, 2.0, 0.2505)


def test_search_finds_two_failure_modes_separately(tmp_path):
    made = search(
        tmp_path,
        Fake(
            workload=lambda case: any(fault.kind == "link.down" for fault in case.faults),
            wrong_elements=lambda case: any(fault.kind == "gpu.xid" for fault in case.faults),
        ),
        until=2,
    )
    made.go()
    actual = {failure.checks: [fault.kind for fault in failure.smallest.faults] for failure in made.failures}
    assert actual == {("workload",): ["link.down"], ("wrong_elements",): ["gpu.xid"]}


def test_search_failure_met_only_while_another_is_shrunk_is_kept(tmp_path):
    """The failure was seen once: it is reported unshrunk."""
    cases = []

    def once(case):
        cases.append(case)
        return len(cases) == 12

    made = search(tmp_path, Fake(workload=lambda case: len(case.faults) > 1, harness=once))
    made.go()
    assert [failure.checks for failure in made.failures] == [("workload",), ("harness",)]
    other = made.failures[1]
    assert to_toml(other.smallest) == to_toml(cases[11])
    assert not other.is_smallest


def test_search_repeats_a_case_only_to_confirm_it(tmp_path):
    run = Fake(workload=lambda case: len(case.faults) > 1)
    made = search(tmp_path, run, runs=2000)
    made.go()
    texts = [to_toml(case) for case in run.cases]
    assert len(texts) - len(set(texts)) == len(made.failures) == 1


def test_search_resumed_replays_earlier_failures_first(overlap, tmp_path):
    """The first run of a new search is the smallest failing case of the previous search, whatever the seed."""
    first, folder = overlap
    run = Fake(workload=overlap_on_one_host)
    again = search(shutil.copytree(folder, tmp_path / "again"), run, seed=99)
    again.go()
    smallest = to_toml(first.failures[0].smallest)
    assert to_toml(run.cases[0]) == smallest
    assert [to_toml(failure.smallest) for failure in again.failures] == [smallest]


def test_search_budget_that_ends_while_shrinking_keeps_the_smallest_so_far(overlap, tmp_path):
    whole, _ = overlap
    first = next(number for number, one in enumerate(whole.tried, start=1) if one.outcome.failures)
    cut = search(tmp_path / "other", Fake(workload=overlap_on_one_host), runs=first + 1)
    cut.go()
    (failure,) = cut.failures
    assert len(cut.tried) == first + 1
    assert not failure.is_smallest
    assert failure.fails_again is None
    assert overlap_on_one_host(failure.smallest)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), LabError("the lab is not up")])
def test_search_interrupted_reports_its_findings(tmp_path, error):
    """Ctrl-C and a lost lab are not failures of a case, and no finding is lost."""
    inner = Fake(workload=overlap_on_one_host)

    def run(case):
        if any(overlap_on_one_host(case) for case in inner.cases):
            raise error
        return inner(case)

    made = search(tmp_path, run)
    with pytest.raises(type(error)):
        made.go()
    (failure,) = made.failures
    assert overlap_on_one_host(failure.smallest)
    assert not failure.is_smallest


def test_search_failure_without_a_second_occurrence_is_reported_as_not_repeated(tmp_path):
    cases = []

    def run(case):
        cases.append(case)
        return Outcome(verdict="FAIL", failures={"workload": "once"}) if len(cases) == 3 else PASSED

    made = search(tmp_path, run)
    made.go()
    assert [failure.fails_again for failure in made.failures] == [False]


def test_search_same_seed_draws_the_same_cases(tmp_path):
    runs = [Fake(), Fake(), Fake()]
    for number, (run, seed) in enumerate(zip(runs, (5, 5, 6), strict=True)):
        search(tmp_path / str(number), run, runs=15, seed=seed).go()
    one, two, other = ([to_toml(case) for case in run.cases] for run in runs)
    assert one == two != other


def test_search_short_draws_mostly_cases_with_faults(tmp_path):
    """Hypothesis begins with nearly empty cases: most of the dozen runs that a lab has time for would lack a fault."""
    run = Fake()
    search(tmp_path, run, runs=20, kinds=ALL, workloads=tuple(draw.WORKLOADS)).go()
    assert sum(bool(case.faults) for case in run.cases) >= 10
    assert len({case.workload.get("collective", case.workload.get("flow")) for case in run.cases}) >= 4


@settings(max_examples=samples(60))
@given(strategy(kinds=ALL, workloads=tuple(draw.WORKLOADS)))
def test_drawn_case_fits_the_lab(case):
    """Every case decodes, can be planned and is permitted, and no fault outlasts the workload."""
    source = to_toml(case).encode()
    decoded = experiment.decode(source, source="case")
    resolved = resolve(decoded, source, MINI)
    assert refusal(resolved, MINI) is None
    assert [(fault.kind, fault.target.text) for fault in resolved.faults] == [
        (fault.kind, fault.target) for fault in case.faults
    ]
    assert all(fault.at_s + fault.for_s < duration_s(case) for fault in case.faults)
    assert tomllib.loads(source.decode())["seed"] == 1


def test_every_declared_key_is_drawn_sometimes():
    """A filter used to drop `check`: no fuzzed flow had ever compared a byte."""
    drawn = []

    @hypothesis.seed(7)
    @settings(max_examples=1500, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(hypothesis.strategies.one_of(*(made(MINI.topology) for made in draw.WORKLOADS.values())))
    def collect(workload):
        drawn.append(workload)

    def fits(workload):
        source = to_toml(Case(workload=workload)).encode()
        try:
            resolve(experiment.decode(source, source="case"), source, MINI)
        except UsageError:
            return False
        return True

    collect()
    for section, own in ((Collective, "collective"), (Flow, "flow")):
        for field in fields_of(section):
            some = [workload for workload in drawn if own in workload and field.key in workload]
            if field.key in ("duration", "iterations"):  # a case sets its time itself
                continue
            assert some, field.key
            # Several ranks on an RNIC talk within a host, which a soft lab refuses for all but a few schedules.
            assert any(map(fits, some)) or field.key == "ranks_per_rnic", field.key


def test_drawn_values_of_a_field_are_valid_and_none_is_its_default():
    for section in (Collective, Flow):
        for field in fields_of(section):
            for value in draw.values_of(field, MINI.topology.rnic_names):
                problems = []
                read_fields(section, {field.key: value}, "workload", problems, "x")
                assert not [one for one in problems if "missing" not in one.sentence], (field.key, value)
                assert field.required or value != (field.default and field.type.write(field.default)), field.key


@settings(max_examples=samples(40))
@given(strategy(kinds=ALL, workloads=("flow",), may_disrupt=("host2*",)))
def test_drawn_faults_stay_within_the_labs_policy(case):
    assert all(fault.target.startswith("host2") and fault.for_s <= 2 for fault in case.faults)


def test_strategy_of_a_lab_that_permits_nothing_is_rejected():
    with pytest.raises(Unsupported, match=r"has no target for link\.down that its owner allows"):
        strategy(kinds=("link.down",), may_disrupt=())


def test_kinds_match_patterns_and_irreversible_ones_must_be_named():
    links = {name: kind for name, kind in CATALOGUE.items() if name.startswith("link.")}
    assert set(kinds_named(("link.*",), "soft")) == {name for name, kind in links.items() if "soft" in kind.fidelity}
    assert "host.rank-kill" not in kinds_named(("host.*",), "soft")
    assert kinds_named(("host.rank-kill",), "soft") == ("host.rank-kill",)
    with pytest.raises(UsageError, match=r"did you mean link.down\?"):
        kinds_named(("link.downn",), "soft")
    with pytest.raises(Unsupported, match=r"fault kind of x\.\*"):
        kinds_named(("x.*",), "soft")


def verdict(*, faults=(), lab_state="CLEAN", **checks):
    return VerdictFile(
        experiment="fuzz", seed=1, lab="soft-mini", verdict=max(checks.values(), default=Verdict.PASS),
        checks=tuple(
            Check(name=name, verdict=outcome, observed=None, bound=None, unit="", detail=f"why {name}")
            for name, outcome in checks.items()
        ),
        faults=tuple(faults), lab_state=lab_state,
    )  # fmt: skip


def case_of(*kinds):
    return Case(
        workload={"collective": "barrier"},
        faults=tuple(FaultSpec(kind=kind, target="host1", at_s=4, for_s=1) for kind in kinds),
    )


def test_outcome_fail_error_and_dirty_are_failures_and_inconclusive_is_not():
    output = verdict(
        lab_state="DIRTY", workload=Verdict.FAIL, harness=Verdict.ERROR, lab_restored=Verdict.INCONCLUSIVE,
        wrong_elements=Verdict.PASS,
    )  # fmt: skip
    result = outcome_of(case_of("link.down"), output)
    assert result.failures == {
        "workload": "why workload", "harness": "why harness", "lab_restored": "why lab_restored"
    }  # fmt: skip
    assert outcome_of(case_of("link.down"), verdict(x=Verdict.INCONCLUSIVE)).failed == frozenset()


@pytest.mark.parametrize(
    ("kind", "checks"), [(kind.name, set(kind.may_fail)) for kind in CATALOGUE.values() if kind.may_fail]
)
def test_outcome_intended_by_a_fault_is_excused_and_no_other(kind, checks):
    """A killed rank ends its job; it excuses neither a DIRTY lab nor another check."""
    assert kind in CATALOGUE
    every = dict.fromkeys((*checks, "harness"), Verdict.FAIL)
    result = outcome_of(case_of(kind), verdict(**every, lab_state="DIRTY"))
    assert result.failed == {"harness", "lab_restored"}
    assert result.excused == tuple(sorted(checks))
    assert outcome_of(case_of("link.down"), verdict(**every)).failed == every.keys()


def test_outcome_fault_that_may_end_a_job_does_not_excuse_wrong_data():
    """Wrong bytes of a flow used to be a failed workload only, which a reboot of a host may cause."""
    result = outcome_of(case_of("host.reboot"), verdict(workload=Verdict.FAIL, wrong_bytes=Verdict.FAIL))
    assert (result.failed, result.excused) == ({"wrong_bytes"}, ("workload",))


def test_outcome_fault_that_was_never_armed_excuses_nothing():
    """The job ended before the rank was killed, so its failure is a finding."""
    fired = Fired(count=0, first_ns=None, last_ns=None, witness=None, must_move={}, must_not_move={})
    receipt = Receipt(
        id="a", kind="host.rank-kill", target="host1", fidelity="real", armed=Armed(ok=False), fired=fired,
        cleared=Cleared(ok=False), unproven=("it was never tried",),
    )  # fmt: skip
    result = outcome_of(case_of("host.rank-kill"), verdict(faults=[receipt], workload=Verdict.FAIL))
    assert (result.failed, result.excused) == ({"workload"}, ())
    acted = msgspec.structs.replace(receipt, armed=Armed(ok=True))
    result = outcome_of(case_of("host.rank-kill"), verdict(faults=[acted], workload=Verdict.FAIL))
    assert (result.failed, result.excused) == (frozenset(), ("workload",))


@pytest.mark.parametrize(
    ("kind", "params", "excused"),
    [
        ("gpu.ecc", {"error": "high-rate"}, ()),
        ("gpu.ecc", {"error": "uncontained"}, ("workload",)),
        ("gpu.ecc", {}, ("workload",)),
        ("gpu.overheat", {"celsius": 94}, ()),
        ("gpu.overheat", {"celsius": 95}, ("workload",)),
    ],
)
def test_outcome_of_a_fault_that_is_mild_excuses_nothing(kind, params, excused):
    """Corrected errors and heat below the shutdown end no job: one that ended has failed."""
    faults = (FaultSpec(kind=kind, target="host1:gpu0", at_s=4, for_s=1, params=params),)
    result = outcome_of(Case(workload={"collective": "barrier"}, faults=faults), verdict(workload=Verdict.FAIL))
    assert result.excused == excused
    assert result.failed == {"workload"} - set(excused)


def test_outcome_unproven_fault_is_reported_separately():
    fired = Fired(count=0, first_ns=None, last_ns=None, witness=None, must_move={}, must_not_move={})
    receipt = Receipt(
        id="a", kind="packet.drop", target="host1:rxe0", fidelity="real", armed=Armed(ok=False), fired=fired,
        cleared=Cleared(ok=False),
        unproven=("it never fired", "more"),
    )  # fmt: skip
    result = outcome_of(case_of("packet.drop"), verdict(faults=[receipt], x=Verdict.INCONCLUSIVE))
    assert not result.failures
    assert [(one.kind, one.target, one.reason) for one in result.unproven] == [
        ("packet.drop", "host1:rxe0", "it never fired")
    ]


def test_keep_writes_the_smallest_case_as_an_experiment(overlap, tmp_path):
    (failure,) = overlap[0].failures
    folder = keep(failure, tmp_path / "found-1", MINI)
    text = (folder / "experiment.toml").read_text()
    assert "# Found by `faultbed fuzz` on soft-mini. It fails: workload." in text
    assert f"# Shrunk from {len(failure.first.faults)} faults to 2 in {failure.runs} runs." in text
    kept = experiment.decode(text.encode(), source="kept")
    assert [fault.kind for fault in kept.faults] == [fault.kind for fault in failure.smallest.faults]
    resolve(kept, text.encode(), MINI)
    script = (folder / "repro.sh").read_text()
    assert 'run "$here/experiment.toml" --seed 1' in script
    assert subprocess.run(["sh", "-n", folder / "repro.sh"], check=False, timeout=20).returncode == 0


def test_command_plan_draws_and_touches_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path / "home"))
    words = ["--lab", "soft-mini", "fuzz", "--plan", "--examples", "6", "--kinds", "link.*"]
    shown = CliRunner().invoke(cli, words, standalone_mode=False)
    assert shown.return_value == 0, shown.output
    assert "6 cases of seed 1; nothing was touched" in shown.output
    drawn = json.loads(CliRunner().invoke(cli, [*words, "--json"], standalone_mode=False).output)
    assert len(drawn) == 6
    assert {fault["kind"].partition(".")[0] for case in drawn for fault in case["faults"]} == {"link"}
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def fake_lab(monkeypatch, tmp_path):
    """Run the command with a lab that is up and not reserved, and with synthetic runs."""
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("faultbed.testbed.backends.soft.lifecycle.up", lambda *_, **__: None)

    def invoke(run, *words):
        monkeypatch.setattr(fuzzing.on_lab, "Runner", lambda **_: run)
        argv = ["--lab", "soft-mini", "fuzz", "--out", str(tmp_path / "out"), "--json", *words]
        return CliRunner().invoke(cli, argv, standalone_mode=False)

    return invoke


def test_fuzz_exit_code_shows_whether_failures_were_detected(fake_lab, tmp_path):
    words = ("--kinds", "link.down", "--kinds", "packet.drop", "--workloads", "collective")
    nothing = fake_lab(Fake(), "--examples", "5", *words)
    assert nothing.return_value == 0
    assert json.loads(nothing.stdout)["verdicts"] == {"PASS": 5}
    none = fake_lab(Fake(), "--for", "0s", *words)
    assert (none.return_value, json.loads(none.stdout)["runs"]) == (2, 0)
    result = fake_lab(Fake(workload=overlap_on_one_host), "--examples", "60", *words)
    assert result.return_value == 1
    (one,) = json.loads(result.stdout)["found"]
    assert len(one["smallest"]["faults"]) == 2
    assert (tmp_path / "out" / "found-1" / "experiment.toml").exists()


def test_fuzz_command_whose_runs_show_nothing_is_no_pass(fake_lab):
    """If no fault can be proven, no run fails, and that must not look like a pass."""
    unproven = Outcome(verdict="INCONCLUSIVE", failures={})
    ended = fake_lab(lambda _case: unproven, "--kinds", "link.down", "--examples", "3")
    assert (ended.return_value, json.loads(ended.stdout)["verdicts"]) == (2, {"INCONCLUSIVE": 3})


def test_fuzz_command_keeps_findings_of_an_earlier_search(fake_lab, tmp_path):
    first, second = (tmp_path / "out" / f"found-{number}" / "experiment.toml" for number in (1, 2))
    for kind in ("link.down", "packet.drop"):
        result = fake_lab(Fake(workload=lambda case: bool(case.faults)), "--kinds", kind, "--examples", "20")
        assert result.return_value == 1
    assert 'kind = "link.down"' in first.read_text()
    assert 'kind = "packet.drop"' in second.read_text()


def test_fuzz_command_ended_by_ctrl_c_shows_its_findings(fake_lab):
    inner = Fake(workload=lambda case: bool(case.faults))

    def run(case):
        if any(case.faults for case in inner.cases):
            raise KeyboardInterrupt
        return inner(case)

    ended = fake_lab(run, "--kinds", "link.down")
    assert isinstance(ended.exception, click.Abort)
    assert len(json.loads(ended.stdout)["found"]) == 1
