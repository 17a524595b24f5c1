"""Repeat offenders: what counts as a strike, how strikes decay, what is drained, and how it is handed over."""

import json
import shlex
import shutil
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from click.testing import CliRunner
from finished_run import finished
from hypothesis import given
from hypothesis import strategies as st
from labelled_run import Network
from synthetic_run import soft_topology

from harness.attribution.offenders import Strike, Thresholds, offenders, strikes_of_preflight, strikes_of_run
from harness.cli.main import cli
from harness.findings import Finding
from harness.record.measurements import ResilienceRun
from harness.verdict import Verdict, VerdictFile
from testbed.errors import UsageError
from traffic.workloads.elastic.elastic_results import Restart

NOW = datetime(2026, 11, 25, tzinfo=UTC)
TOPOLOGY = soft_topology()


def finding(name="host2:gpu0", *, cause="slow-rank", place="gpu", confidence=0.8):
    return Finding(cause=cause, place=place, name=name, confidence=confidence, evidence=("it is slow",))


def verdict(*findings, lab="soft"):
    return VerdictFile(
        experiment="job",
        seed=1,
        lab=lab,
        verdict=Verdict.PASS,
        checks=(),
        faults=(),
        lab_state="CLEAN",
        attribution=findings,
    )


def measured(kind=None, target=None, *, ranks=("host1", "host2", "host3", "host4")):
    run = Network(seed=1).measured(kind, target)
    return msgspec.structs.replace(run, ranks=tuple(one for one in run.ranks if one.host in ranks))


def strikes(*findings, kind=None, target=None, drills=False, ranks=("host1", "host2", "host3", "host4")):
    result = strikes_of_run(
        measured(kind, target, ranks=ranks), verdict(*findings), origin="run", at=NOW, drills=drills
    )
    return [(one.name, one.cause, one.weight) for one in result]


def test_host_that_a_job_lost_and_replaced_is_blamed():
    """Its ranks moved to a spare, so that the last placement does not have it any more."""
    run = measured(ranks=("host1", "host3", "host4"))
    restart = Restart(
        number=1,
        reason="host2: no message",
        cause="host",
        hosts=("host2",),
        before=("host1:rxe0", "host2:rxe0", "host3:rxe0"),
        after=("host1:rxe0", "host4:rxe0", "host3:rxe0"),
        progress_ns=1,
        noticed_ns=2,
        iterations=3,
    )
    resilience = ResilienceRun(restarts=(restart,), states=(), repeated_iterations=0, initialised_ns=1, connections=6)
    blamed = verdict(finding("host2", cause="host-down", place="rank"))
    assert strikes_of_run(run, blamed, origin="run", at=NOW) == ()
    run = msgspec.structs.replace(run, resilience=resilience)
    assert [one.name for one in strikes_of_run(run, blamed, origin="run", at=NOW)] == ["host2"]


def strike(name="host2", *, days_ago=0.0, weight=1.0):
    return Strike(name=name, cause="slow-rank", origin="run", at=NOW - timedelta(days=days_ago), weight=weight)


def test_run_without_faults_strikes_each_blamed_part_once():
    twice = (
        finding(confidence=0.6),
        finding(confidence=0.9),
        finding("rtsw1:ctsw1", cause="loss", place="rtsw-ctsw-link"),
    )
    assert strikes(*twice) == [("host2:gpu0", "slow-rank", 0.9), ("rtsw1:ctsw1", "loss", 0.8)]


@pytest.mark.parametrize("one", [finding(confidence=0.4), finding("", cause="nothing", place="none", confidence=0.9)])
def test_run_with_an_uncertain_finding_gives_no_strike(one):
    assert strikes(one) == []


def test_run_with_injected_faults_strikes_nothing():
    """A chaos lab would send to repair what it throttles itself."""
    assert strikes(finding("host3"), kind="gpu.throttle", target="host2:gpu0") == []


def test_drill_strikes_only_findings_no_injected_fault_explains():
    output = (finding("host2:gpu0"), finding("host3", place="rank"))
    result = strikes(*output, kind="gpu.throttle", target="host2:gpu0", drills=True)
    assert result == [("host3", "slow-rank", 0.8)]


def test_spare_without_a_rank_is_never_struck():
    assert strikes(finding("host4:rxe0", place="rnic"), ranks=("host1", "host2", "host3")) == []
    assert strikes(finding("host4:rxe0", place="rnic")) != []


def test_storage_host_without_a_rank_can_be_struck():
    one = finding("host4", cause="slow-storage", place="storage")
    assert strikes(one, ranks=("host1", "host2", "host3")) == [("host4", "slow-storage", 0.8)]


def test_preflight_strikes_each_place_once():
    wrong = [
        {"check": "mtu", "where": "host1:rxe0", "found": "1024", "wanted": "4096", "do": ""},
        {"check": "gid", "where": "host1:rxe0 (index 1)", "found": "none", "wanted": "one", "do": ""},
        {"check": "bgp", "where": "rtsw1", "found": "1", "wanted": "2", "do": ""},
    ]
    result = strikes_of_preflight({"wrong": wrong}, origin="p.json", at=NOW)
    assert [(one.name, one.cause, one.weight) for one in result] == [("host1:rxe0", "mtu", 1.0), ("rtsw1", "bgp", 1.0)]


def outliers(*pairs):
    return [{"check": "burn-in", "where": pair, "found": "3.00 times worse", "wanted": "", "do": ""} for pair in pairs]


@pytest.mark.parametrize(
    ("pairs", "blamed"),
    [
        (["host1:rxe0 > host3:rxe0", "host2:rxe0 > host3:rxe0", "host3:rxe0 > host4:rxe0"], ["host3:rxe0"]),
        (["host1:rxe0 > host3:rxe0"], []),
        (["host1:rxe0 > host3:rxe0", "host3:rxe0 > host1:rxe0"], []),  # one pair, in both directions
        (["host1:rxe0 > host2:rxe0", "host3:rxe0 > host4:rxe0"], []),
        (["a:r > x:r", "b:r > x:r", "c:r > x:r", "a:r > y:r", "b:r > y:r"], ["x:r", "y:r"]),
    ],
)
def test_preflight_blames_the_end_that_slow_pairs_have_in_common(pairs, blamed):
    """A bad receiver made every sender an offender, and drained hosts that are well."""
    result = strikes_of_preflight({"wrong": outliers(*pairs)}, origin="p.json", at=NOW)
    assert [one.name for one in result] == blamed


def test_preflight_pair_of_an_end_that_another_check_found_wrong_blames_no_other_end():
    link = {"check": "link", "where": "host3:rxe0", "found": "down", "wanted": "up", "do": ""}
    wrong = [*outliers("host1:rxe0 > host3:rxe0", "host1:rxe0 > host3:rxe0"), link]
    result = strikes_of_preflight({"wrong": wrong}, origin="p.json", at=NOW)
    assert [(one.name, one.cause) for one in result] == [("host3:rxe0", "link")]


@pytest.mark.parametrize("check", ["leftovers", "reservations"])
def test_preflight_blames_no_host_for_what_a_fault_left_behind(check):
    """The injector would send its own victims to repair."""
    wrong = [{"check": check, "where": "host2", "found": "a fault holder", "wanted": "none", "do": "heal"}]
    assert strikes_of_preflight({"wrong": wrong}, origin="p.json", at=NOW) == ()


def test_offenders_leaves_out_preflights_of_another_lab(tmp_path):
    file = tmp_path / "p.json"
    file.write_text(json.dumps({"lab": "other", "wrong": [{"check": "gpu", "where": "host2:gpu0"}]}))
    answer = json.loads(command("--runs", tmp_path, "--preflight", file, "--json").stdout)
    assert (answer["preflights"], answer["other_preflights"], answer["offenders"]) == (0, 1, [])
    assert "left out: 1 preflight of other labs" in command("--runs", tmp_path, "--preflight", file).stdout


@pytest.mark.parametrize("content", [[], {}, {"wrong": 3}, {"wrong": [{"check": "mtu"}]}, None])
def test_preflight_of_another_format_is_refused(content):
    with pytest.raises(UsageError, match="not what `faultbed preflight"):
        strikes_of_preflight(content, origin="p.json", at=NOW)


def test_strike_counts_half_after_each_half_life():
    (offender,) = offenders([strike(days_ago=14)], TOPOLOGY, Thresholds(), now=NOW)
    assert offender.score == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("days", "action"),
    [
        ([0], "watch"),
        ([0, 0.1], "drain"),
        ([0, 0.1, 0.2, 0.3, 0.4], "drain"),  # one bad night replaces no part
        ([0, 1, 2], "drain"),
        ([0, 1, 2, 3], "RMA"),
    ],
)
def test_action_follows_score_and_days(days, action):
    (offender,) = offenders([strike(days_ago=day) for day in days], TOPOLOGY, Thresholds(), now=NOW)
    assert (offender.action, round(offender.score, 1)) == (action, round(sum(0.5 ** (day / 7) for day in days), 1))


@given(
    ages=st.lists(st.floats(0, 60), min_size=1, max_size=20),
    more=st.floats(0, 60),
    drain=st.floats(0.1, 5),
    over=st.floats(0, 5),
)
def test_another_strike_never_lowers_the_score_or_the_action(ages, more, drain, over):
    order = ("watch", "drain", "RMA")
    thresholds = Thresholds(drain=drain, rma=drain + over)
    (before,) = offenders([strike(days_ago=age) for age in ages], TOPOLOGY, thresholds, now=NOW)
    (after,) = offenders([strike(days_ago=age) for age in (*ages, more)], TOPOLOGY, thresholds, now=NOW)
    assert after.score >= before.score
    assert order.index(after.action) >= order.index(before.action)


@pytest.mark.parametrize(("drain", "rma"), [(0, 1), (3, 2), (-1, 4)])
def test_thresholds_that_contradict_each_other_are_refused(drain, rma):
    with pytest.raises(UsageError, match="want 0 < drain <= RMA"):
        Thresholds(drain=drain, rma=rma)


@pytest.mark.parametrize(
    ("name", "host"), [("host2:gpu0", "host2"), ("rtsw1:host1:rxe0", "host1"), ("rtsw1:ctsw1", ""), ("ctsw1", "")]
)
def test_offender_names_its_host(name, host):
    (offender,) = offenders([strike(name)], TOPOLOGY, Thresholds(), now=NOW)
    assert offender.host == host


def command(*words):
    return CliRunner().invoke(cli, ["--lab", "soft", "offenders", *map(str, words)], standalone_mode=False)


@pytest.fixture
def runs(tmp_path):
    """Three runs without faults that blame host2's GPU, and one drill."""
    for number, kind in enumerate((None, None, None, "gpu.throttle")):
        run = Network(seed=number + 1).measured(kind, None if kind is None else "host3:gpu0")
        directory = finished(tmp_path / str(number), run)
        content = msgspec.structs.replace(directory.read_verdict(), lab="soft", attribution=(finding(),))
        directory.write_verdict(content)
        day = datetime.now(UTC) - timedelta(days=number)
        directory.path.rename(tmp_path / f"{day:%Y%m%dT%H%M%SZ}-demo-{number}")
        (tmp_path / str(number)).rmdir()
    return tmp_path


def test_offenders_reads_runs_and_preflights(runs, tmp_path_factory):
    file = tmp_path_factory.mktemp("preflight") / "p.json"
    file.write_text(json.dumps({"wrong": [{"check": "gpu", "where": "host2:gpu0"}]}))
    answer = json.loads(command("--runs", runs, "--preflight", file, "--json").stdout)
    (one,) = answer["offenders"]
    assert (answer["runs"], answer["drills"], len(one["strikes"])) == (4, 1, 4)
    assert (one["name"], one["host"], one["action"]) == ("host2:gpu0", "host2", "RMA")
    assert one["strikes"][0]["cause"] == "gpu"
    text = command("--runs", runs, "--preflight", file).stdout
    assert "3 runs and 1 preflight: 1 place blamed" in text
    beside = file.parent / "." / file.name
    assert command("--runs", runs, "--preflight", file, "--preflight", beside).stdout == text, "it is one preflight"
    assert "left out: 1 run with injected faults" in text


def test_offenders_counts_the_copy_of_a_run_once(runs):
    """A copied run directory is no second strike: it would drain a host that was blamed once."""
    (original,) = (path for path in runs.iterdir() if path.name.endswith("-demo-2"))
    for path in runs.iterdir():
        if path != original:
            shutil.rmtree(path)
    before = json.loads(command("--runs", runs, "--json").stdout)["offenders"]
    shutil.copytree(original, runs / f"{original.name}-copy")
    after = json.loads(command("--runs", runs, "--json").stdout)
    assert [len(one["strikes"]) for one in after["offenders"]] == [len(one["strikes"]) for one in before] == [1]
    assert after["copies"] == 1
    assert "left out: 1 copy of runs" in command("--runs", runs).stdout


def test_offenders_leaves_out_runs_of_another_lab(runs):
    invoked = CliRunner().invoke(cli, ["--lab", "soft-3rack", "offenders", "--runs", str(runs)], standalone_mode=False)
    assert "0 runs and 0 preflights: 0 places blamed" in invoked.stdout
    assert "left out: 4 runs of other labs" in invoked.stdout


def test_offenders_hands_over_to_schedulers(runs):
    (line,) = command("--runs", runs, "--hand-over", "slurm").stdout.splitlines()
    assert shlex.split(line)[:4] == ["scontrol", "update", "NodeName=host2", "State=DRAIN"]
    assert command("--runs", runs, "--hand-over", "hostfile").stdout.split() == ["host1", "host3", "host4"]
    assert "faultbed.io/offender=drain:NoSchedule" in command("--runs", runs, "--hand-over", "kubernetes").stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--runs", "no-such-folder"), "--runs no-such-folder: no such folder"),
        (("--runs", ".", "--half-life", "soon"), "--half-life soon"),
        (("--runs", ".", "--half-life", "0s"), "must be more than 0"),
        (("--runs", ".", "--drain", "5", "--rma", "2"), "want 0 < drain <= RMA"),
    ],
)
def test_offenders_command_rejects_invalid_parameters(words, says):
    error = command(*words).exception
    assert isinstance(error, UsageError), error
    assert says in str(error)
