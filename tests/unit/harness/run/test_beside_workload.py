"""Probes during a run: their paths while routes change, findings over time, and the section [probe]."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import threading
import time
from types import SimpleNamespace

import pytest
from experiment_text import COLLECTIVE, FLOW, read
from house import HOUSE
from hypothesis import given
from hypothesis import strategies as st
from pass_stand_ins import pass_of, setting_of
from probe_echoes import echo

from faultbed.harness.experiment import run_plan
from faultbed.harness.experiment.experiment_file import decode
from faultbed.harness.parts.bystander import bystander_part
from faultbed.harness.parts.capture import capture_part
from faultbed.harness.parts.passes import Active, PassRefuted
from faultbed.harness.parts.probes import probes_part
from faultbed.harness.parts.telemetry import telemetry_part
from faultbed.harness.parts.twin import twin_part
from faultbed.harness.record.rundir import RunDir
from faultbed.harness.report.comparison.differences import of_plans
from faultbed.harness.run import loop
from faultbed.harness.run.run_record import RunRecord, begin_pass
from faultbed.testbed.errors import ConfigError, LabError
from faultbed.testbed.inventory.lab_inventory import load
from faultbed.testbed.observe.telemetry import Change
from faultbed.traffic.engine.run_results import Connection
from faultbed.traffic.probes import paths
from faultbed.traffic.probes.paths import PathQuery, PathTracker, trips
from faultbed.traffic.probes.prober import Probing
from faultbed.traffic.probes.results import ProbeTrips, lossy, one_way, windows
from faultbed.traffic.probes.rtt import Trip

THERE = ("host1:rxe0", "rtsw1", "ctsw1", "rtsw2", "host3:rxe0")
OTHER = ("host1:rxe0", "rtsw1", "ctsw2", "rtsw2", "host3:rxe0")
S = 1_000_000_000
SOFT = HOUSE / "inventory" / "soft.yml"


def path_query(start, end, way=THERE, qpns=(17, 18)):
    return PathQuery(start_ns=start, end_ns=end, paths={0: (*qpns, way, THERE[::-1])} if way else {})


def sent(*times):
    return [echo(5, 2, sent_ns=at) for at in times]


def test_trip_between_equal_answers_has_a_path():
    with_path, unknown = trips(sent(25, 5, 15), [path_query(0, 0), path_query(10, 12), path_query(30, 31)])
    assert [one.echo.sent_ns for one in with_path] == [5, 15, 25]
    assert {(one.there, one.back) for one in with_path} == {(THERE, THERE[::-1])}
    assert unknown == 0


@pytest.mark.parametrize(
    "after",
    [path_query(30, 31, OTHER), path_query(30, 31, None), path_query(30, 31, qpns=(17, 19))],
    ids=["another path", "an unknown path", "a rebuilt queue pair"],
)
def test_trip_next_to_a_change_has_no_path(after):
    with_path, unknown = trips(sent(5, 11, 15, 35), [path_query(0, 0), path_query(10, 12), after, path_query(40, 40)])
    assert [one.echo.sent_ns for one in with_path] == [5], (
        "while a switch answers (at 11), the order of answer and change is unknown"
    )
    assert unknown == 3


def test_trip_after_the_last_answer_has_no_path():
    assert trips(sent(5, 50), [path_query(0, 0), path_query(10, 12)])[1] == 1
    assert trips(sent(5), [path_query(0, 0)]) == ((), 1)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=40), st.lists(st.integers(0, 400)))
def test_trips_never_have_a_path_that_no_switch_reported(schedule, times):
    """Oracle: a trip has a path only if the last answer before it and the first one after it agree."""
    every, now = [], 0
    for gap, is_other in schedule:
        every.append(path_query(now, now + 2, OTHER if is_other else THERE))
        now += 3 + gap
    with_path, unknown = trips(sent(*times), every)
    by_time = {one.echo.sent_ns: one.there for one in with_path}
    assert len(with_path) + unknown == len(times)
    for at in times:
        before = [one for one in every if one.end_ns <= at]
        after = [one for one in every if one.start_ns > at]
        same = before and after and before[-1].paths == after[0].paths
        assert by_time.get(at) == (before[-1].paths[0][2] if same else None)


def connection(**change):
    values = dict.fromkeys((one.name for one in dataclasses.fields(Connection)), 0)
    return Connection(**{**values, "src": "host1:rxe0", "dst": "host3:rxe0", "lqpn": 17, "rqpn": 18, **change})


def test_path_tracker_queries_at_start_at_changes_and_at_end(monkeypatch):
    turns = iter([THERE, OTHER, LabError("a switch is frozen"), THERE])
    output = threading.Semaphore(0)

    def lookup(_lab, connections):
        if connections[0].src != "host1:rxe0":
            return {0: ("host3", "rtsw2", "ctsw1", "rtsw1", "host1")}
        output.release()
        way = next(turns)
        if isinstance(way, LabError):
            raise way
        return {0: (way[0].partition(":")[0], *way[1:-1], way[-1].partition(":")[0])}

    monkeypatch.setattr(paths, "data_paths", lookup)
    monkeypatch.setattr(paths, "SPACING_S", 0.01)
    following = PathTracker(None, lambda: [connection()])
    following.open()
    for _ in range(2):
        assert output.acquire(timeout=10)
        following.report_change()
    assert output.acquire(timeout=10)
    following.close()
    following.close()
    assert [one.paths.get(0, (0, 0, None))[2] for one in following.queries] == [THERE, OTHER, None, THERE]
    assert following.queries[0].end_ns == 0, "what is sent before the first answer is known has had no change yet"
    assert following.queries[-1].end_ns <= time.monotonic_ns()


@pytest.mark.parametrize("way", [("host1", "rtsw1"), ("host1", "rtsw1", "ctsw1"), ()])
def test_path_that_ends_at_a_switch_is_left_out(monkeypatch, way):
    monkeypatch.setattr(paths, "data_paths", lambda _lab, _connections: {0: way})
    following = PathTracker(None, lambda: [connection()])
    following.query()
    assert following.queries[0].paths == {}


def trip(at, *, came=True, whole_ns=500, there=THERE):
    one = echo(whole_ns if came else None, 2 if came else None, sent_ns=at, came=came)
    return Trip(there=there, back=there[::-1], echo=one)


def test_one_way_counts_a_probe_and_its_answer_separately():
    """One of three probes is answered, one is lost on its way, and the answer to the third is lost."""
    lost_back = Trip(there=THERE, back=OTHER[::-1], echo=echo(None, 2))
    journeys = {one.path: (one.sent, one.lost) for one in one_way([trip(0), trip(1, came=False), lost_back])}
    assert journeys == {THERE: (3, 1), THERE[::-1]: (1, 0), OTHER[::-1]: (1, 1)}


def test_windows_are_whole_and_hold_the_trips_that_began_in_them():
    result = windows([trip(at * S) for at in (10, 11, 13, 16)], length_ns=2 * S, start_ns=10 * S, end_ns=17 * S)
    assert [(one.start_ns // S, sum(each.sent for each in one.probes)) for one in result] == [(10, 4), (12, 2), (14, 0)]


def test_lossy_returns_only_the_interval_of_loss():
    """Half of the probes of one path are lost from 6 to 8 s of 16 s; those of another path arrive."""
    every = [
        trip(number * S // 20, there=way, came=way == OTHER or not 120 <= number < 160 or number % 2 == 0)
        for number in range(320)
        for way in (THERE, OTHER)
    ]
    (result,) = lossy(every, length_ns=2 * S)
    assert (result.start_ns, result.end_ns) == (6 * S, 8 * S)
    (suspect,) = result.suspects
    assert ("rtsw1", "ctsw1") in (suspect.place, *suspect.alike)
    assert (suspect.sent, suspect.lost) == (40, 20)


@given(seed=st.integers(0, 10_000))
def test_lossy_with_background_loss_returns_nothing(seed):
    rng = random.Random(seed)
    every = [trip(at * S // 20, came=rng.random() > 0.002, there=rng.choice([THERE, OTHER])) for at in range(1200)]
    assert lossy(every, length_ns=2 * S) == ()
    assert lossy((), length_ns=2 * S) == ()


def test_probe_section_may_be_empty_or_set_rates():
    assert read(COLLECTIVE.format("all-reduce", "")).probe is None
    usual = read(COLLECTIVE.format("all-reduce", "[probe]")).probe
    assert (usual.per_s, usual.qps) == (0.5, 4)
    chosen = read(COLLECTIVE.format("all-reduce", "[probe]\nrate = 10\nqps = 8")).probe
    assert (chosen.per_s, chosen.qps) == (10.0, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rate = 0", "probe.rate"),
        ("qps = 65", "probe.qps"),
        ("every = 1", 'no key "every" here; choose one of rate, qps'),
    ],
)
def test_probe_section_with_invalid_values_is_rejected_with_its_path(text, message):
    with pytest.raises(ConfigError, match=message):
        read(COLLECTIVE.format("all-reduce", f"[probe]\n{text}"))


def test_path_tracker_queries_after_route_changes_but_not_after_log_lines(monkeypatch):
    heard, asked_again = [], []
    probing = SimpleNamespace(report_change=lambda: asked_again.append(1))
    monkeypatch.setattr(probes_part.prober, "start", lambda *_: contextlib.nullcontext(probing))
    monkeypatch.setattr(probes_part.prober, "pairs", lambda _topology: [])
    run = pass_of(lab=SimpleNamespace(topology=None))
    probes = probes_part.Probes(run, None)
    run.active.update(others=type("Others", (Active,), {"on_change": lambda _, change: heard.append(change)})())
    run.active.update(probes=probes)
    with probes.around():
        for subject in ("route 10.0.0.0/24", "kernel", "link ctsw1"):
            run.on_change(Change(at_ns=1, node="rtsw1", subject=subject, text=None))
    assert (len(heard), len(asked_again)) == (3, 2)


def test_run_with_probes_is_planned_with_all_hosts_of_a_rack():
    """Only two of four hosts take part in the flow. Another user may have reserved the others."""
    lab = load(SOFT)
    text = FLOW.format("write", "{}").replace('"host1"', '"host1:rxe0"').replace('"host3"', '"host3:rxe0"')
    for section, count in (("", 2), ("[probe]\nrate = 5", 4)):
        source = text.format(section).encode()
        resolved = loop.resolve(decode(source, source="x.toml"), source, lab)
        assert len(set(loop.touched(resolved, lab.topology))) == count
    assert (resolved.plan.probe.per_s, resolved.plan.probe.qps) == (5.0, 4)
    plain = loop.resolve(decode(text.format("").encode(), source="x.toml"), source, lab).plan
    assert "probe" not in json.loads(run_plan.encode(plain))
    (difference,) = of_plans(plain, resolved.plan)
    assert (difference.what, difference.b) == ("probes", "5 a second, 4 queue pairs")


def test_probing_without_path_answers_reports_the_reason():
    """SONiC reports no paths, so all probes are left out. That must not look like "no probe lost"."""
    probing = Probing(None, SimpleNamespace(close=lambda: None), SimpleNamespace(connections=()))
    probing._echoes = tuple(sent(5))
    probing._tracker.queries = [path_query(0, 0, None), path_query(10, 10, None)]
    probing._tracker.failure = "rtsw1: SONiC tells no ways"
    assert probing.collected() == ProbeTrips(trips=(), unknown=1, trouble="rtsw1: SONiC tells no ways")


class Workload(SimpleNamespace):
    """A workload that is over at once."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.ended_ns = 3

    def wait(self, _patience):
        return self.result


def twin_of(monkeypatch, tmp_path, result, *, experiment=None):
    """Return a twin pass with the parts of an experiment, and what runs it to its end with this result."""
    running = Workload(began_ns=1, started_ns=2, ended_ns=3, standstills=(), result=result)
    monkeypatch.setattr(loop.workload, "engines_started_ahead", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(loop.workload, "start", lambda *_: running)
    monkeypatch.setattr(loop.workload, "patience_s", lambda *_: 1.0)
    monkeypatch.setattr(loop.workload, "paths_of", lambda *_: {})
    monkeypatch.setattr("faultbed.harness.run.run_record.seal", lambda _run: None)
    journal = SimpleNamespace(doing=lambda *_args, **_facts: contextlib.nullcontext())
    setting = setting_of(
        experiment=experiment or SimpleNamespace(fabric=None, capture=(), probe=None, bystander=None),
        plan=SimpleNamespace(workload="collective", faults=()),
        lab=SimpleNamespace(topology=None, guard=lambda: None),
        journal=journal,
        run_dir=RunDir(tmp_path),
    )
    return begin_pass(RunRecord(setting=setting), "twin"), running


def test_twin_runs_under_the_same_capture_probes_and_bystander_as_the_run(monkeypatch, tmp_path):
    """A twin without the capture was faster, so that `jct_ratio` held the cost of the capture."""
    beside = []

    @contextlib.contextmanager
    def going_on(name):
        beside.append(name)
        yield SimpleNamespace(
            name=name, heard_ns=dict, without_log=list, stop=lambda: ended.append(name), wait=lambda _: None,
            collected=lambda: None,
        )  # fmt: skip
        beside.remove(name)

    during, ended = [], []
    monkeypatch.setattr(capture_part.packet_capture, "start", lambda _lab, ports: going_on(f"capture {ports}"))
    monkeypatch.setattr(probes_part.prober, "start", lambda _lab, _probe: going_on("probes"))
    monkeypatch.setattr(probes_part.prober, "pairs", lambda _topology: [])
    monkeypatch.setattr(bystander_part.flow_run, "start_all", lambda _lab, _flows: going_on("bystander"))
    monkeypatch.setattr(telemetry_part.telemetry, "start", lambda _lab, **_: going_on("watchers"))
    experiment = SimpleNamespace(
        capture=("rtsw1:ctsw1",), probe=object(), bystander=SimpleNamespace(src="host2:rxe0", dst="host4:rxe0"),
        cnp=None, fabric=None,
    )  # fmt: skip
    run, running = twin_of(monkeypatch, tmp_path, SimpleNamespace(outcome="completed"), experiment=experiment)
    monkeypatch.setattr(loop.workload, "engines_started_ahead", lambda _experiment, _lab: going_on("engines"))
    running.wait = lambda _patience: during.extend(beside) or running.result
    loop._run_pass(run, lambda _event: None)

    assert sorted(during) == ["bystander", "capture ('rtsw1:ctsw1',)", "engines", "probes", "watchers"]
    assert beside == []
    assert [name.partition(" ")[0] for name in ended] == ["watchers", "bystander", "probes", "capture"]
    assert [*run.active] == ["twin", "capture", "probes", "bystander", "telemetry"]
    assert (run.work.t0_ns, run.work.end_ns) == (2, 3)


def twin_that_ends_with(monkeypatch, tmp_path, result):
    """Run a twin whose workload has this result."""
    monkeypatch.setattr("faultbed.harness.run.run_record.PARTS", (twin_part.PART,))
    run, _ = twin_of(monkeypatch, tmp_path, result)
    loop._run_pass(run, lambda _event: None)


def test_twin_that_was_restarted_is_not_fault_free(monkeypatch, tmp_path):
    """A job that lost a host by itself took long in the twin, and `jct_ratio` of the run with the fault was good."""
    result = SimpleNamespace(outcome="recovered", restarts=(SimpleNamespace(reason="host2: the engine is gone"),))
    with pytest.raises(LabError, match=r"twin was restarted.*host2: the engine is gone"):
        twin_that_ends_with(monkeypatch, tmp_path, result)


@pytest.mark.parametrize(("wrong", "error"), [(7, PassRefuted), (0, LabError)])
def test_twin_with_wrong_elements_in_its_warm_up_is_a_failure_and_no_error(monkeypatch, tmp_path, wrong, error):
    where = "host1, rank0: 7 wrong elements in the warm-up"
    result = SimpleNamespace(outcome="failed", where=where, wrong_elements=wrong)
    with pytest.raises(error, match=where) as raised:
        twin_that_ends_with(monkeypatch, tmp_path, result)
    assert type(raised.value) is error
