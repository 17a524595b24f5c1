"""Slow ranks are reported during the run, once per alarm, and equal those in the report of the finished run."""

from __future__ import annotations

import contextlib
import itertools
import queue
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from engine_labs import RANK_OF, RankEngine, RankLab
from hypothesis import given, settings
from hypothesis import strategies as st
from pass_stand_ins import setting_of
from samples import samples
from synthetic_run import MS, T0, S, changed, soft_topology, synthetic_run

from bench.fail_slow import Noise, healthy_times
from faultbed.harness.analysis.ranks.fail_slow import detect
from faultbed.harness.analysis.ranks.slow_ranks import slow_ranks
from faultbed.harness.experiment import run_plan
from faultbed.harness.experiment.experiment_file import decode
from faultbed.harness.experiment.stop import METRICS, Condition
from faultbed.harness.parts.passes import EarlyEnd
from faultbed.harness.parts.slow_ranks.online import Online
from faultbed.harness.parts.stops.live_values import Live, StopWatcher
from faultbed.harness.parts.stops.stop_guard import Guard
from faultbed.harness.parts.telemetry import telemetry_part
from faultbed.harness.record.evidence.workload_evidence import Iteration, Rank, RankSeries
from faultbed.harness.record.rundir import RunDir
from faultbed.harness.run import loop as run_module
from faultbed.harness.run.prepare.bind_to_lab import fit
from faultbed.harness.run.run_record import RunRecord, begin_pass
from faultbed.inject.journal import Journal
from faultbed.testbed.observe.telemetry import Recorded

RNICS = [f"host{host}:rxe{number}" for number in (0, 1) for host in (1, 2, 3, 4)]
SLOW = Condition(metric=METRICS["slow_ranks"], bound=0)
HEALTHY = """
name = "x"
[workload]
collective = "all-reduce"
size = "1MiB"
iterations = 100
warmup = 0
compute_units = 8
"""


def compute_ns(ranks, iterations, *, slow=2, since=80, until=None, seed=0):
    """Compute times in ns, array of (iterations, ranks); rank `slow` takes 1.3 times as long between two of them."""
    noise = Noise(deviation=0.01, correlation=0.0, long=0.0, ranks=ranks)
    times = healthy_times(noise, iterations, np.random.default_rng(seed))
    times[since:until, slow] *= 1.3
    return (times * 100 * MS).astype(np.int64)


def event(rank, index, time_ns):
    return {"event": "iteration", "task": f"rank{rank}", "index": index, "compute_ns": int(time_ns)}


def events(times, start=0):
    """Return the events of whole iterations, one after the other."""
    return [event(rank, start + index, one) for index, row in enumerate(times) for rank, one in enumerate(row)]


def audit_fields(events, ranks=4):
    """Return the progress lines for these events, and the number of slow ranks at the end."""
    lines = []
    with Online(RNICS[:ranks], soft_topology(), lines.append) as online:
        for one in events:
            online.on_event(one)
    return lines, online.count()


def finished(times, counts):
    """Return the run in which rank r has finished the first `counts[r]` iterations."""
    series = []
    for rank, count in enumerate(counts):
        steps = [
            Iteration(index=index, start_ns=T0 + index * S, compute_ns=int(one), comm_ns=MS, wait_ns=0)
            for index, one in enumerate(times[:count, rank])
        ]
        series.append(RankSeries(rank=rank, iterations=tuple(steps)))
    ranks = [Rank(rank=rank, host=name[:5], rnic=name[6:]) for rank, name in enumerate(RNICS[: len(counts)])]
    return changed(synthetic_run(), ranks=tuple(ranks), series=tuple(series))


@settings(max_examples=samples(30), deadline=None)
@given(st.integers(2, 8), st.integers(50, 70), st.booleans(), st.randoms(use_true_random=False))
def test_online_alarms_equal_the_finished_runs_alarms(ranks, since, in_order, random):
    """Ranks report in any order and stop anywhere. Both analyses use, in order, the iterations that all finished."""
    times = compute_ns(ranks, 130, slow=ranks - 1, since=since, seed=random.randrange(20))
    counts = [random.randint(100, 130) for _ in range(ranks)]
    order = [(rank, index) for rank, count in enumerate(counts) for index in range(count)]
    random.shuffle(order)
    if in_order:  # in any order of ranks, but in order for each rank
        own = [itertools.count() for _ in range(ranks)]
        order = [(rank, next(own[rank])) for rank, _ in order]
    lines, _ = audit_fields([event(rank, index, times[index, rank]) for rank, index in order], ranks)
    of_gpu = [range(gpu, ranks, 4) for gpu in range(min(ranks, 4))]  # both RNICs of a host use its only GPU
    racks = ["rack1" if gpu < 2 else "rack2" for gpu in range(len(of_gpu))]
    by_gpu = np.array([np.median(times[: min(counts), own], axis=1) for own in of_gpu]).T
    alarms = [replace(one, rank=rank) for one in detect(by_gpu, racks=racks) for rank in of_gpu[one.rank]]
    assert alarms
    assert lines == [
        f"rank {alarm.rank} ({RNICS[alarm.rank]}) computes about {100 * alarm.slowdown:.0f} % slower "
        f"since iteration {alarm.since}; found at iteration {alarm.iteration}"
        for alarm in alarms
    ]
    assert [(one.rank, one.iteration, one.since, one.slowdown) for one in slow_ranks(finished(times, counts)).slow] == [
        (alarm.rank, alarm.iteration, alarm.since, alarm.slowdown) for alarm in alarms
    ]


def test_online_ranks_of_one_gpu_become_slow_together():
    """Two racks have one host with two ranks each. Both ranks of the slow host count for a stop condition."""
    times = compute_ns(4, 130, slow=slice(0, None, 2))
    with Online(["host1:rxe0", "host3:rxe0"] * 2, soft_topology(), lambda _: None) as online:
        for one in events(times):
            online.on_event(one)
    assert online.count() == 2


def test_online_alarm_is_reported_once_while_the_job_runs():
    times, lines = compute_ns(4, 150, slow=2), queue.Queue()
    with Online(RNICS[:4], soft_topology(), lines.put) as online:
        for one in events(times[:100]):
            online.on_event(one)
        output = lines.get(timeout=20)
        for one in events(times[100:], start=100):
            online.on_event(one)
    assert output.startswith("rank 2 (host3:rxe0) computes about ")
    assert " since iteration 80; found at iteration 8" in output
    assert online.count() == 1
    assert lines.empty()


def test_online_recovered_rank_is_not_counted_and_reported_again_when_slow():
    times = compute_ns(4, 300, slow=1, until=120)
    times[220:, 1] = times[220:, 1] * 13 // 10
    assert audit_fields(events(times[:200])) == (audit_fields(events(times))[0][:1], 0)
    lines, count = audit_fields(events(times))
    assert [line.split(" computes")[0] for line in lines] == ["rank 1 (host2:rxe0)"] * 2
    assert count == 1


def test_online_count_is_unknown_before_enough_iterations():
    times = compute_ns(4, 150, slow=2)
    assert audit_fields(events(times[:8])) == ([], None)
    assert audit_fields(events(times[:70])) == ([], 0)


@pytest.mark.parametrize(
    ("ranks", "events"),
    [
        (1, events(compute_ns(4, 150)[:, :1])),
        (4, events(0 * compute_ns(4, 150))),
        (0, [{"event": "sample", "task": "flow0", "start_ns": 0, "sizes": [1]}]),
    ],
    ids=["one rank", "nothing computed", "flows"],
)
def test_online_reports_nothing_without_ranks_to_compare(ranks, events):
    assert audit_fields(events, ranks) == ([], None)


def test_online_stops_when_a_rank_computes_nothing():
    times = compute_ns(4, 150, since=100)
    times[90, 0] = 0
    assert audit_fields(events(times)) == ([], None)
    assert slow_ranks(finished(times, [150] * 4)).slow == ()


def test_online_slow_rank_stops_a_run():
    live = Live()
    with Online(RNICS[:4], soft_topology(), lambda _: None) as online:
        live.slow_ranks = online.count
        guard, ending = Guard([SLOW]), EarlyEnd()
        with StopWatcher(guard, live, ending):
            for one in events(compute_ns(4, 100, slow=3)):
                online.on_event(one)
            assert ending.wait(20)
    assert ending.error is None
    assert guard.held.value == 1


def test_online_internal_error_stops_the_run():
    live, lines = Live(), []
    with Online(RNICS[:4], soft_topology(), lines.append) as online:
        for rank in range(4):
            online.on_event({**event(rank, 0, 1), "compute_ns": "soon"})
    live.slow_ranks = online.count
    ending = EarlyEnd()
    with StopWatcher(Guard([]), live, ending):
        assert ending.wait(20)
    (line,) = lines
    assert line.startswith("slow ranks are no longer detected: TypeError")
    assert line in ending.error


class Computing(RankEngine):
    """A workload that reports all its iterations as soon as it starts."""

    times = compute_ns(4, 100, slow=2)

    def do_start(self, task):
        rank, now_ns = RANK_OF[self.host], time.monotonic_ns()
        for index, took_ns in enumerate(self.times[:, rank].tolist()):
            self.emit(
                "iteration", task=task, index=index, start_ns=now_ns, end_ns=now_ns + took_ns + MS, compute_ns=took_ns,
                comm_ns=MS, wait_ns=0, wrong=0, phases_ns=[MS],
            )  # fmt: skip
        self.emit("done", task=task, start_ns=now_ns, end_ns=now_ns + S, iterations=len(self.times), wrong=0)


class ComputingLab(RankLab):
    engine = Computing


def test_online_watches_a_run_without_faults(tmp_path, monkeypatch):
    """The real run loop, progress lines and threads; only the engines are stand-ins, and machines report nothing."""
    following = SimpleNamespace(heard_ns=dict, without_log=list, stop=Recorded)
    monkeypatch.setattr(telemetry_part.telemetry, "start", lambda *_, **__: contextlib.nullcontext(following))
    monkeypatch.setattr(telemetry_part.counters, "read", lambda _lab: {})
    monkeypatch.setattr(run_module.workload, "paths_of", lambda *_: {})
    experiment = fit(decode(HEALTHY.encode(), source="x.toml"), ComputingLab.topology, "soft")
    plan = run_plan.plan(experiment, inventory_digest="9f" * 32, version="0")
    lab, lines = ComputingLab(None), []
    lab.heartbeat, lab.guard, lab.state_dir = lambda: None, lambda: None, tmp_path
    lab.started_ahead = lambda *_: contextlib.nullcontext()
    with Journal(tmp_path / "journal") as journal:
        setting = setting_of(
            experiment=experiment, plan=plan, ranks=RNICS[:4], lab=lab, journal=journal, run_dir=RunDir(tmp_path),
            progress=lines.append,
        )  # fmt: skip
        run = begin_pass(RunRecord(setting=setting), "measured")
        run_module._run_pass(run, lambda _: None)
    assert run.work.result.outcome == "completed"
    (output,) = (line for line in lines if line != "workload is running")
    assert output.startswith("rank 2 (host3:rxe0) computes about ")
