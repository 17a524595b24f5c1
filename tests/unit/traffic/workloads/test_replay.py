"""A replay runs its trace's operations as one program per rank, correct whichever rank is slow, with the trace's
pauses.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from engine_labs import NothingStarts
from house import TRACES
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import Lanes, inputs_of
from made_traces import by_rank, drawn_trace, operations
from samples import samples
from trace_lab import TraceLab

from faultbed.harness.cli.context import Session
from faultbed.harness.cli.main import cli
from faultbed.harness.cli.traffic.replays import _show_result
from faultbed.testbed.errors import UsageError
from faultbed.traffic import traces
from faultbed.traffic.engine.run_results import Iteration
from faultbed.traffic.node.ranks.gate import Gate
from faultbed.traffic.schedules import cost
from faultbed.traffic.workloads import collective, recording, replay, replay_batches
from faultbed.traffic.workloads.collective import CollectiveSpec
from faultbed.traffic.workloads.job import JobPhase, JobSpec
from faultbed.traffic.workloads.replay_batches import ReplaySpec
from faultbed.traffic.workloads.replay_result import ReplayResult

NETWORK = cost.NETWORKS["soft"]


@given(
    rows=operations,
    segment=st.integers(2, 400),
    most=st.sampled_from([40_000, 1 << 20]),
    choice=st.randoms(use_true_random=False),
)
@settings(max_examples=samples(25))
def test_batches_with_any_slow_rank_give_correct_results(rows, segment, most, choice):
    trace = drawn_trace(rows)
    batches = replay_batches.batches(trace, ReplaySpec(batch_bytes=most), NETWORK)
    assert [operation for batch in batches for operation in batch.operations] == list(trace.operations)
    for batch in batches:
        programs, longest = list(batch.programs), 30_000  # patterns of later phases begin further on
        assert max(program["elements"] for program in programs) * 4 <= most
        lanes = Lanes(programs, longest, segment=segment, slots=2)
        while ready := list(lanes.moves()):
            lanes.do(*choice.choice(ready))
        assert lanes.are_done()
        for program, memory, plan in zip(programs, lanes.data, lanes.plans, strict=True):
            mine = [operation for operation in batch.operations if program["rank"] in operation.members]
            assert len(plan.phases) == max(1, len(mine))
            for offset, count, source, index in program["results"]:
                members = program["groups"][-1 - source] if source < 0 else [source]
                want = sum(inputs_of(rank, longest)[index : index + count] for rank in members)
                assert (memory[offset : offset + count] == want).all()


def test_batch_pauses_precede_their_operation():
    trace = traces.load(TRACES / "tensor-parallel")
    (batch,) = replay_batches.batches(trace, ReplaySpec(speed=2.0), NETWORK)
    assert [program["pauses"] for program in batch.programs] == [
        [[0, 1_000_000, 0], [1, 1_500_000, 0], [3, 500_000, 0]]
    ] * 4
    assert batch.gates[0] == (0, 0)
    assert batch.gates[3] == (None,) * 4
    assert batch.phases[5] == (4, 3, 4, 3), "two of the ranks have a message before it"
    (quick,) = replay_batches.batches(trace, ReplaySpec(pauses=False), NETWORK)
    assert all(program["pauses"] == [] for program in quick.programs)


def test_second_batch_counts_times_from_its_own_start():
    trace = traces.load(TRACES / "ranking.json")
    batches = replay_batches.batches(trace, ReplaySpec(batch_bytes=600_000), NETWORK)
    assert [len(batch.operations) for batch in batches] == [4, 2]
    assert batches[1].programs[0]["pauses"] == [[1, 0, 10_000_000]]


def test_gate_opens_after_its_pause_and_not_before_its_time():
    gate = Gate([[0, 0, 100], [2, 50, 1000]], fences=[4, 9])
    gate.begin(10_000)
    assert gate.step == -1, "nothing may be sent"
    assert gate.advance(0, 10_000) == 10_100
    assert gate.advance(0, 10_100) is None
    assert (gate.step, gate.advance(1, 10_200)) == (9, None), "what is before it has no time yet"
    assert gate.advance(2, 10_970) == 11_020, "after what was before it, as that took so long"
    assert gate.advance(2, 11_020) is None
    assert gate.step > 1 << 40
    assert gate.paused_ns == [100, 50]
    gate.begin(20_000)
    assert gate.advance(0, 20_100) is None
    assert gate.advance(2, 20_200) == 21_000, "its time is later"
    idle = Gate([], fences=[3])
    assert (idle.advance(0, 5), idle.paused_ns) == (None, [])


@pytest.mark.parametrize("batch_bytes", [32 << 20, 600_000])
def test_operation_time_is_that_of_the_member_that_waits_least(batch_bytes):
    lab = TraceLab(lambda engine: engine.over())
    trace = traces.load(TRACES / "ranking.json")
    result = replay.run(lab, ReplaySpec(repeat=2, batch_bytes=batch_bytes), trace)
    assert (result.outcome, result.where) == ("completed", None)
    assert [operation.record for operation in result.operations] == [1, 4, 5, 6, 7, 8]
    assert {operation.time_ns for operation in result.operations} == {1_000_000}
    assert result.operations[0].busbw_gbytes_per_s == pytest.approx(3 * 16384 / 1e6)
    assert len(lab.engines) == 4, "lent from batch to batch"
    assert all(engine.ended for engine in lab.engines)


def test_failed_replay_reports_where_and_stops():
    lab = TraceLab(lambda engine: engine.do_quit() if engine.host == "host3" else None)
    result = replay.run(lab, ReplaySpec(batch_bytes=600_000), traces.load(TRACES / "ranking.json"))
    assert result.outcome == "failed"
    assert "host3: the traffic engine is gone" in result.where
    assert result.operations == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "bf16"}, "a replay carries fp32 or int32"),
        ({"repeat": 0}, "at least once"),
        ({"speed": 0.0}, "above 0"),
        ({"batch_bytes": 1000}, "record 1: all-to-allv of 65536 bytes needs 131072 bytes per rank"),
        ({"ranks": ("host1:rxe0", "host2:rxe0")}, "has 4 ranks, but there are 2 RNICs"),
    ],
)
def test_replay_refusals_come_before_anything_starts(change, message):
    with pytest.raises(UsageError, match=message):
        replay.run(NothingStarts(), ReplaySpec(**change), traces.load(TRACES / "ranking.json"))


@pytest.mark.parametrize("start", [replay.run, replay.start])
def test_replay_that_overruns_a_completion_queue_is_refused_before_anything_starts(start):
    with pytest.raises(UsageError, match=r"host2:rxe0 would have .* its completion queue holds 32767"):
        start(NothingStarts(), ReplaySpec(qps_per_peer=128, spread="dqplb"), traces.load(TRACES / "ranking.json"))


# Recorded.


def iterations(phases, starts):
    return tuple(
        Iteration(
            index=index, start_ns=at - 500, end_ns=at + phases[-1], compute_ns=500, comm_ns=phases[-1], wait_ns=0,
            wrong_elements=0, phases_ns=phases,
        )
        for index, at in enumerate(starts)
    )  # fmt: skip


class Result:
    def __init__(self, spec, per_rank):
        self.spec, self.iterations, self.ranks = spec, per_rank, tuple(f"host{n}" for n in range(len(per_rank)))


@pytest.mark.parametrize("form", traces.FORMATS)
def test_recorded_job_loads_unchanged(form, tmp_path):
    spec = JobSpec(
        grid=(("tp", 2), ("dp", 2)),
        phases=(
            JobPhase(along="tp", collective="all-reduce", size_bytes=4096),
            JobPhase(along="dp", collective="all-gather", size_bytes=8192),
        ),
    )
    per_rank = [iterations((2000_000, 5000_000), (10**9 + 1000 * rank, 2 * 10**9)) for rank in range(4)]
    trace = recording.of_job(Result(spec, per_rank))
    assert len(trace.operations) == 2 * 4
    assert trace.operations[0].not_before_ns == (0, 1000)
    assert trace.operations[2].not_before_ns == (2000_000, 2002_000)
    assert trace.operations[2].duration_ns == 3000_000
    traces.save(trace, tmp_path / "t", form=form)
    again = traces.load(tmp_path / "t")
    for rank in range(4):
        assert by_rank(again, rank) == by_rank(trace, rank)


@pytest.mark.parametrize("name", ["all-reduce", "all-to-allv", "broadcast", "send-recv", "barrier"])
def test_recorded_collective_keeps_its_operations(name, tmp_path):
    spec = CollectiveSpec(collective=name, size_bytes=4096, root=1, skew=1.0, dtype="int32", iterations=2)
    trace = recording.of_collective(Result(spec, [iterations((7000,), (0, 9000))] * 3))
    traces.save(trace, tmp_path / "t", form="param")
    again = traces.load(tmp_path / "t")
    for rank in range(3):
        assert by_rank(again, rank) == by_rank(trace, rank)
    if name == "send-recv":
        assert {operation.members for operation in again.operations} == {(0, 1), (1, 2), (2, 0)}
    elif name == "all-to-allv":
        counts = collective.layout(spec, 3).counts * 4
        assert again.operations[0].counts == tuple(tuple(row) for row in counts.tolist())
    assert replay_batches.batches(traces.fitted(again, ranks=3), ReplaySpec(), NETWORK)


# The command.


def test_replay_dry_run_lists_operations_without_a_lab(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path))
    done = CliRunner().invoke(cli, ["traffic", "replay", str(TRACES / "pipeline"), "--dry-run", "--json"])
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)
    assert plan["ranks"]["3"] == "host4:rxe0"
    assert [operation["collective"] for operation in plan["operations"]][:3] == ["all-reduce", "all-reduce", "p2p"]
    assert plan["operations"][2]["wait_ns"] == 5_000_000
    done = CliRunner().invoke(cli, ["traffic", "replay", str(TRACES / "ranking.json"), "--dry-run"])
    assert "skipped: " in done.stdout
    assert "record 3: compute gemm" in done.stdout


@pytest.mark.parametrize(("repeat", "often"), [(1, "once"), (2, "2 times")])
def test_replay_summary_shows_the_number_of_repetitions(repeat, often, capsys):
    done = ReplayResult(
        spec=ReplaySpec(repeat=repeat), source="x", outcome="completed", where=None, ranks=(), operations=(),
        wrong_elements=0, time_ns=470_000_000, qp_errors=(), rebuilds=(),
    )  # fmt: skip
    _show_result(Session(None), done)
    assert f"0 operations, {often}, in 470 ms; 0 wrong elements" in capsys.readouterr().out


def test_replay_of_unsupported_records_is_refused_with_the_record(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path))
    record = {"in_msg_size": 4, "out_msg_size": 4, "dtype": "float32", "world_size": 4}
    path = Path(tmp_path) / "t.json"
    path.write_text(json.dumps([{"comms": "all_reduce", **record}, {"comms": "gather", **record}]))
    done = CliRunner().invoke(cli, ["traffic", "replay", str(path)])
    assert isinstance(done.exception, UsageError)
    assert "record 1: gather: this collective is not supported" in str(done.exception)
    path.write_text(json.dumps([{"comms": "all_reduce", **record, "world_size": 8}]))
    done = CliRunner().invoke(cli, ["traffic", "replay", str(path), "--dry-run"])
    assert "has 8 ranks, but there are 4 RNICs; --shrink" in str(done.exception)
    done = CliRunner().invoke(cli, ["traffic", "replay", str(path), "--dry-run", "--shrink"])
    assert done.exit_code == 0
