"""Repeat offenders: which findings count as strikes, how strikes decay, which parts are drained, and the hand-over."""

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
from synthetic_run import changed, soft_topology

from faultbed.harness.attribution.gpu_readings import GpuReading, readings_of_preflight, readings_of_run
from faultbed.harness.attribution.offenders import Strike, Thresholds, offenders, strikes_of_preflight, strikes_of_run
from faultbed.harness.cli.main import cli
from faultbed.harness.findings import Attribution
from faultbed.harness.record.evidence.workload_evidence import ResilienceRun
from faultbed.harness.verdict import Verdict, VerdictFile
from faultbed.testbed.errors import UsageError
from faultbed.testbed.node.gpu.health import Health
from faultbed.testbed.node.gpu.xid import SYNTHETIC
from faultbed.testbed.observe.gpu_thresholds import breaches
from faultbed.testbed.observe.telemetry import Change, Machine
from faultbed.traffic.workloads.elastic.elastic_results import Restart

NOW = datetime(2026, 11, 25, tzinfo=UTC)
TOPOLOGY = soft_topology()


def finding(name="host2:gpu0", *, cause="slow-rank", place="gpu", confidence=0.8):
    return Attribution(cause=cause, place=place, name=name, confidence=confidence, evidence=("it is slow",))


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
    return changed(run, ranks=tuple(rank for rank in run.workload.ranks if rank.host in ranks))


def strikes(*findings, kind=None, target=None, drills=False, ranks=("host1", "host2", "host3", "host4")):
    result = strikes_of_run(
        measured(kind, target, ranks=ranks), verdict(*findings), origin="run", at=NOW, drills=drills
    )
    return [(one.name, one.cause, one.weight) for one in result]


def test_host_that_a_job_lost_and_replaced_is_blamed():
    """The ranks moved to a spare, so the last placement no longer contains the lost host."""
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
    run = changed(run, resilience=resilience)
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


@pytest.mark.parametrize("ended", list(Verdict))
def test_run_that_ended_in_error_strikes_nothing_and_its_gpu_readings_count(ended):
    """The harness failed, so its measurements may be half of a run. What a GPU reports of itself stands."""
    run, judged = measured(), msgspec.structs.replace(verdict(finding()), verdict=ended)
    for rehearsal in (False, True):
        blamed = strikes_of_run(run, judged, origin="run", at=NOW, rehearsal=rehearsal)
        assert [one.name for one in blamed] == ([] if ended is Verdict.ERROR else ["host2:gpu0"])


@pytest.mark.parametrize("one", [finding(confidence=0.4), finding("", cause="nothing", place="none", confidence=0.9)])
def test_run_with_an_uncertain_finding_gives_no_strike(one):
    assert strikes(one) == []


def test_run_with_injected_faults_strikes_nothing():
    """Otherwise a lab with fault injection would send the parts that it throttles itself to repair."""
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
    """One bad receiver used to make every sender an offender, and healthy hosts were drained."""
    result = strikes_of_preflight({"wrong": outliers(*pairs)}, origin="p.json", at=NOW)
    assert [one.name for one in result] == blamed


def test_preflight_slow_pair_with_an_already_failed_end_blames_only_that_end():
    link = {"check": "link", "where": "host3:rxe0", "found": "down", "wanted": "up", "do": ""}
    wrong = [*outliers("host1:rxe0 > host3:rxe0", "host1:rxe0 > host3:rxe0"), link]
    result = strikes_of_preflight({"wrong": wrong}, origin="p.json", at=NOW)
    assert [(one.name, one.cause) for one in result] == [("host3:rxe0", "link")]


def test_preflight_finding_of_the_whole_lab_strikes_no_part():
    """A burn-in that failed three times used to make an offender of the lab's own name, to be sent to repair."""
    wrong = [
        {"check": "burn-in", "where": "soft", "found": "no connection", "wanted": "every pair connects", "do": ""},
        {"check": "mtu", "where": "host1:rxe0", "found": "1024", "wanted": "4096", "do": ""},
    ]
    result = strikes_of_preflight({"lab": "soft", "wrong": wrong}, origin="p.json", at=NOW)
    assert [one.name for one in result] == ["host1:rxe0"]


@pytest.mark.parametrize("check", ["leftovers", "reservations"])
def test_preflight_leftovers_of_faults_are_no_strikes(check):
    """The injector would send its own victims to repair."""
    wrong = [{"check": check, "where": "host2", "found": "a fault holder", "wanted": "none", "do": "heal"}]
    assert strikes_of_preflight({"wrong": wrong}, origin="p.json", at=NOW) == ()


def test_offenders_takes_the_time_of_a_preflight_from_its_content(tmp_path):
    """The time stamp of a copied file is that of the copying: an old strike would count as a new one, and twice."""
    old = {"at": "2025-11-25T10:00:00+00:00", "lab": "soft", "wrong": [{"check": "gpu", "where": "host2:gpu0"}]}
    files = []
    for name in ("p.json", "copy.json"):
        files += ["--preflight", tmp_path / name]
        (tmp_path / name).write_text(json.dumps(old))
    answer = json.loads(command("--runs", tmp_path, *files, "--json").stdout)
    (one,) = answer["offenders"]
    assert (answer["preflights"], answer["copies"], len(one["strikes"])) == (1, 1, 1)
    assert one["score"] < 1e-9
    assert one["action"] == "watch"
    for wrong in ("yesterday", "2025-11-25T10:00:00", 7):
        (tmp_path / "p.json").write_text(json.dumps({**old, "at": wrong}))
        done = command("--runs", tmp_path, "--preflight", tmp_path / "p.json")
        assert "is no time with a zone" in str(done.exception)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checked": 5}, "p.json: checked: must be a list of names of checks; give a file"),
        ({"checked": [None]}, "p.json: checked: must be a list of names of checks; give a file"),
        ({"not_looked": None}, "p.json: not_looked: must be a list of objects; give a file"),
        ({"not_looked": ["host1"]}, "p.json: not_looked: must be a list of objects; give a file"),
    ],
)
def test_preflight_with_lists_of_another_type_is_refused(tmp_path, changes, message):
    """Such lists used to end in a traceback."""
    (tmp_path / "p.json").write_text(json.dumps({"wrong": [], "checked": ["gpu-health"], **changes}))
    error = command("--runs", tmp_path, "--preflight", tmp_path / "p.json").exception
    assert isinstance(error, UsageError), error
    assert message in str(error)


def test_preflight_of_another_time_zone_is_dated_in_utc(tmp_path):
    """The column is called UTC, and RMA counts days: one moment in three zones used to be on two of them."""
    files = []
    for number, stamp in enumerate(
        ("2026-11-25T13:30:00+14:00", "2026-11-24T23:30:00+00:00", "2026-11-24T11:30-12:00")
    ):
        content = {"at": stamp, "wrong": [{"check": "gpu", "where": "host2:gpu0"}]}
        (tmp_path / f"p{number}.json").write_text(json.dumps(content))
        files += ["--preflight", tmp_path / f"p{number}.json"]
    (offender,) = json.loads(command("--runs", tmp_path, *files, "--json").stdout)["offenders"]
    assert {item["at"] for item in offender["strikes"]} == {"2026-11-24T23:30:00+00:00"}
    (tmp_path / "p.json").write_text(json.dumps({"at": "0001-01-01T00:00:00+14:00", "wrong": []}))
    done = command("--runs", tmp_path, "--preflight", tmp_path / "p.json")
    assert "is no time with a zone" in str(done.exception)


def test_strike_from_the_future_is_named_because_it_does_not_decay(tmp_path):
    (tmp_path / "p.json").write_text(
        json.dumps({"at": "2999-01-01T00:00:00+00:00", "wrong": [{"check": "gpu", "where": "host2:gpu0"}]})
    )
    words = ("--runs", tmp_path, "--preflight", tmp_path / "p.json")
    note = "dated in the future, so their strikes count as of today and do not decay: p.json; correct these dates"
    assert note in command(*words).stdout
    assert note in command(*words, "--hand-over", "slurm").stderr, "a scheduler drains by what this prints"
    assert json.loads(command(*words, "--json").stdout)["dated_in_the_future"] == ["p.json"]


def test_strikes_from_the_future_are_of_one_day():
    """A clock set wrongly on three days ahead made one bad night three, and had a part replaced."""
    ahead = [strike(days_ago=-day) for day in (1, 2, 3)]
    (offender,) = offenders(ahead, TOPOLOGY, Thresholds(), now=NOW)
    assert (offender.score, offender.action) == (3.0, "drain")


def test_strike_counts_half_after_each_half_life():
    (offender,) = offenders([strike(days_ago=14)], TOPOLOGY, Thresholds(), now=NOW)
    assert offender.score == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("days", "action"),
    [
        ([0], "watch"),
        ([0, 0.1], "drain"),
        ([0, 0.1, 0.2, 0.3, 0.4], "drain"),  # findings of a single night replace no part
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
    with pytest.raises(UsageError, match="0 < drain <= RMA must hold"):
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
    """A copied run directory would otherwise count as a second strike, and drain a host that was blamed once."""
    (original,) = (path for path in runs.iterdir() if path.name.endswith("-demo-2"))
    for path in runs.iterdir():
        if path != original:
            shutil.rmtree(path)
    before = json.loads(command("--runs", runs, "--json").stdout)["offenders"]
    shutil.copytree(original, runs / f"{original.name}-copy")
    after = json.loads(command("--runs", runs, "--json").stdout)
    assert [len(one["strikes"]) for one in after["offenders"]] == [len(one["strikes"]) for one in before] == [1]
    assert after["copies"] == 1
    assert "left out: 1 copy" in command("--runs", runs).stdout


def test_offenders_leaves_out_runs_of_another_lab(runs):
    invoked = CliRunner().invoke(cli, ["--lab", "soft-3rack", "offenders", "--runs", str(runs)], standalone_mode=False)
    assert "0 runs and 0 preflights: 0 places blamed" in invoked.stdout
    assert "left out: 4 runs of other labs" in invoked.stdout


def test_offenders_hands_over_to_schedulers(runs):
    (line,) = command("--runs", runs, "--hand-over", "slurm").stdout.splitlines()
    assert shlex.split(line)[:4] == ["scontrol", "update", "NodeName=host2", "State=DRAIN"]
    assert command("--runs", runs, "--hand-over", "hostfile").stdout.split() == ["host1", "host3", "host4"]
    assert "faultbed.io/offender=drain:NoSchedule" in command("--runs", runs, "--hand-over", "kubernetes").stdout


def test_offenders_say_why_a_hostfile_is_empty(runs, tmp_path):
    file = tmp_path / "preflight.json"
    file.write_text(json.dumps({"wrong": [{"check": "gpu", "where": f"host{number}:gpu0"} for number in range(1, 5)]}))
    words = ("--runs", runs, "--preflight", file, "--drain", "0.1", "--hand-over", "hostfile")
    answer = command(*words)
    assert answer.stdout.strip() == ""
    assert "no host is left for the file" in answer.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--runs", "no-such-folder"), "--runs no-such-folder: no such folder"),
        (("--runs", ".", "--half-life", "soon"), "--half-life soon"),
        (("--runs", ".", "--half-life", "0s"), "must be more than 0"),
        (("--runs", ".", "--drain", "5", "--rma", "2"), "0 < drain <= RMA must hold"),
    ],
)
def test_offenders_command_rejects_invalid_parameters(words, message):
    error = command(*words).exception
    assert isinstance(error, UsageError), error
    assert message in str(error)


# GPU readings and thresholds

HEALTHY = Health("gpu0").counts()


def gpu_run(*, xids=(), kind=None, synthetic=False, **counters):
    """Return a run with these readings of host2's GPU at its end, and its XID events in the kernel log."""
    after = {
        host.name: {f"gpu0.{name}": value for name, value in HEALTHY.items()} for host in measured().lab.topology.hosts
    }
    after["host2"] |= {f"gpu0.{name}": value for name, value in counters.items()}
    text = SYNTHETIC if synthetic else "pid=7, Contained"
    log = tuple(
        Change(at_ns=1, node="host2", subject="kernel", text=f"3 NVRM: Xid (PCI:gpu0): {xid}, {text}") for xid in xids
    )
    run = measured(kind, "host2:gpu0" if kind else None)
    watched = tuple(Machine(name=host.name, samples=1, busy_ns=0, clock_error_ns=0) for host in run.lab.topology.hosts)
    return changed(run, counters_after=after, kernel=log, watched=watched)


def listed(*runs, strikes=(), **options):
    """Return (name, action, first cause) of each offender in runs, the last of which is the newest."""
    readings = [
        reading
        for days_ago, run in enumerate(reversed(runs))
        for reading in readings_of_run(run, origin="run", at=NOW - timedelta(days=days_ago), **options)
    ]
    ranking = offenders(strikes, TOPOLOGY, Thresholds(), now=NOW, readings=readings)
    return [(one.name, one.action, one.causes[0]) for one in ranking]


@pytest.mark.parametrize(
    ("run", "action", "cause"),
    [
        ({"ecc_uncorrected": 1}, "drain", "drain: ecc_uncorrected is 1 (from 1 on)"),
        ({"remap_pending": 1}, "drain", "drain: remap_pending is 1"),
        ({"remap_failed": 1, "ecc_uncorrected": 1}, "RMA", "RMA: remap_failed is 1"),
        ({"temp_c": 90}, "drain", "drain: temp_c is 90 (from 89 on)"),
        ({"ecc_corrected": 5000}, "watch", "watch: ecc_corrected is 5000"),
        ({"xids": (92,)}, "watch", "watch: XID 92, 1 times"),
        ({"xids": (94, 94)}, "drain", "drain: XID 94, 2 times"),
        ({"xids": (64,)}, "RMA", "RMA: XID 64, 1 times"),
    ],
)
def test_gpu_reading_beyond_a_threshold_needs_action_and_below_it_is_listed(run, action, cause):
    ((name, actual, first),) = listed(gpu_run(**run))
    assert (name, actual) == ("host2:gpu0", action)
    assert first.startswith(cause)


def test_gpu_healthy_again_in_a_newer_run_is_not_drained_any_more():
    assert listed(gpu_run(ecc_uncorrected=1, xids=(95,)), gpu_run()) == []
    assert [action for _, action, _ in listed(gpu_run(), gpu_run(remap_pending=1))] == ["drain"]


def test_xid_event_is_ended_by_a_newer_run_that_followed_the_kernel_log_and_by_no_preflight():
    bad = gpu_run(xids=(74,))

    def actions(*readings):
        return [
            offender.action for offender in offenders([], TOPOLOGY, Thresholds(), now=NOW, readings=sum(readings, ()))
        ]

    before = readings_of_run(bad, origin="bad", at=NOW - timedelta(days=2))
    looked = readings_of_preflight(preflight_of(), TOPOLOGY, origin="p.json", at=NOW - timedelta(days=1))
    deaf = readings_of_run(changed(gpu_run(), watched=()), origin="deaf", at=NOW)
    followed = readings_of_run(gpu_run(), origin="good", at=NOW)
    assert actions(before) == actions(before, looked) == actions(before, looked, deaf) == ["drain"]
    assert actions(before, looked, followed) == []


def test_gpu_threshold_adds_to_strikes_and_never_weakens_them():
    five = [strike("host2:gpu0", days_ago=day) for day in range(5)]
    assert [offender.action for offender in offenders(five, TOPOLOGY, Thresholds(), now=NOW)] == ["RMA"]
    ((name, action, cause),) = listed(gpu_run(ecc_corrected=1), strikes=five)
    assert (name, action) == ("host2:gpu0", "RMA")
    assert cause.startswith("watch: ecc_corrected")


def test_gpu_event_that_a_fault_wrote_drains_nothing_but_in_a_rehearsal():
    run = gpu_run(xids=(95,), synthetic=True)
    assert listed(run) == []
    assert [action for _, action, _ in listed(run, rehearsal=True)] == ["drain"]


def test_gpu_reading_of_a_run_with_its_fault_counts_only_in_a_rehearsal():
    run = gpu_run(xids=(95,), kind="gpu.ecc", synthetic=True, ecc_uncorrected=1)
    assert listed(run) == listed(run, drills=True) == []
    assert [(name, action) for name, action, _ in listed(run, rehearsal=True)] == [("host2:gpu0", "drain")]


def test_gpu_run_without_readings_keeps_an_earlier_breach():
    silent = changed(gpu_run(), counters_after={})
    assert [action for _, action, _ in listed(gpu_run(remap_failed=1), silent)] == ["RMA"]


def test_gpu_reading_from_the_future_hides_no_breach():
    """A preflight of a machine whose clock is years ahead would hide every later breach for years."""
    name, broken = "host2:gpu0", breaches({**HEALTHY, "remap_failed": 1})

    def at(days_ago, *breached):
        when = NOW - timedelta(days=days_ago)
        return readings_of_preflight(preflight_of(*breached), TOPOLOGY, origin="p.json", at=when)

    (offender,) = offenders([], TOPOLOGY, Thresholds(), now=NOW, readings=(*at(3, *broken), *at(-900)))
    assert (offender.name, offender.action) == (name, "RMA")
    assert offenders([], TOPOLOGY, Thresholds(), now=NOW, readings=(*at(-900, *broken), *at(3))) == ()
    assert offenders([], TOPOLOGY, Thresholds(), now=NOW, readings=(*at(3, *broken), *at(-0.5))) == (), "clocks differ"


def test_gpu_breach_at_the_end_of_a_long_run_is_newer_than_a_preflight_beside_it():
    """The run began before the preflight, and read the GPU hours after it."""
    run = gpu_run(remap_failed=1)
    run = changed(run, end_ns=run.workload.t0_ns + 4 * 3600 * 10**9)

    def named(preflight_hours_ago):
        began, looked = NOW - timedelta(hours=5), NOW - timedelta(hours=preflight_hours_ago)
        readings = readings_of_run(run, origin="run", at=began)
        readings += readings_of_preflight(preflight_of(), TOPOLOGY, origin="p.json", at=looked)
        return [one.name for one in offenders([], TOPOLOGY, Thresholds(), now=NOW, readings=readings)]

    assert (named(3), named(0.5)) == (["host2:gpu0"], [])
    far = datetime.max.replace(tzinfo=UTC)
    assert readings_of_run(run, origin="run", at=far)[0].at == far, "a wrong date is no error"


def preflight_of(*breached, not_looked=(), checked=("link", "gpu-health")):
    wrong = [
        {"check": "gpu-health", "where": "host2:gpu0 (00000000:19:00.0)", "found": one.text, "wanted": one.do, "do": ""}
        for one in breached
    ]
    unseen = [{"check": "gpu-health", "where": where, "why": "it is gone"} for where in not_looked]
    return {"checked": list(checked), "wrong": wrong, "not_looked": unseen}


def test_gpu_breach_of_a_preflight_is_read_from_its_file_and_ended_by_a_newer_one():
    bad = preflight_of(*breaches({**HEALTHY, "remap_failed": 1}))

    def readings(content, days_ago=0):
        return readings_of_preflight(content, TOPOLOGY, origin="p.json", at=NOW - timedelta(days=days_ago))

    def actions(*each):
        return [
            (offender.name, offender.action)
            for offender in offenders([], TOPOLOGY, Thresholds(), now=NOW, readings=sum(each, ()))
        ]

    assert actions(readings(bad)) == [("host2:gpu0", "RMA")]
    assert actions(readings(bad, 1), readings(preflight_of())) == []
    assert actions(readings(bad, 1), readings(preflight_of(not_looked=("host2",)))) == [("host2:gpu0", "RMA")]
    assert actions(readings(bad, 1), readings(preflight_of(checked=("link",)))) == [("host2:gpu0", "RMA")]
    assert all(isinstance(reading, GpuReading) for reading in readings(bad))


def test_gpu_breach_is_handed_over_with_its_reason_and_a_rehearsal_is_not(tmp_path):
    file = tmp_path / "preflight.json"
    file.write_text(json.dumps(preflight_of(*breaches({**HEALTHY, "remap_pending": 1}))))
    empty = ["--runs", str(tmp_path / "none"), "--preflight", str(file)]
    done = CliRunner().invoke(cli, ["offenders", *empty, "--hand-over", "slurm"])
    assert done.exit_code == 0, done.output
    assert shlex.split(done.output)[:4] == ["scontrol", "update", "NodeName=host2", "State=DRAIN"]
    assert "remap_pending is 1" in done.output
    refused = CliRunner().invoke(cli, ["offenders", *empty, "--hand-over", "slurm", "--rehearse"])
    assert isinstance(refused.exception, UsageError)
    assert "--rehearse" in str(refused.exception)
    for words, is_one in (((), False), (("--rehearse",), True)):
        listed = CliRunner().invoke(cli, ["offenders", *empty, *words, "--json"])
        assert json.loads(listed.output)["rehearsal"] is is_one
    shown = CliRunner().invoke(cli, ["offenders", *empty, "--rehearse"])
    assert "a rehearsal" in shown.output
