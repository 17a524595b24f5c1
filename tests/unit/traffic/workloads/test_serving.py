"""Inference and ranking jobs: programs of their ranks, and the metrics computed from their reports."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from engine_labs import RANK_OF, NothingStarts, RankEngine, RankLab

from faultbed.testbed.errors import UsageError
from faultbed.traffic.schedules import cost
from faultbed.traffic.workloads import inference, ranking, replay_batches
from faultbed.traffic.workloads.inference import InferenceSpec
from faultbed.traffic.workloads.ranking import RankingSpec
from faultbed.traffic.workloads.replay_batches import ReplaySpec
from faultbed.traffic.workloads.service_level import kept_of

NETWORK = cost.NETWORKS["soft"]
MS = 1_000_000


class PacedEngine(RankEngine):
    """An engine whose phases end at the times in ms that its lab gives."""

    def do_task(self, task, **fields):
        self.program, self.iterations = fields["spec"]["program"], fields["spec"]["iterations"]
        super().do_task(task=task, **fields)

    def over(self):
        task, at_ns = f"rank{RANK_OF[self.host]}", time.monotonic_ns() // MS * MS
        for index in range(self.iterations):
            ends = self.lab.ends(self.host, index, len(self.program["fences"]) + 1)
            self.emit(
                "iteration", task=task, index=index, start_ns=at_ns, end_ns=at_ns + ends[-1] * MS, compute_ns=0,
                comm_ns=ends[-1] * MS, wait_ns=0, wrong=0, phases_ns=[end * MS for end in ends], paused_ns=[],
            )  # fmt: skip
        self.emit("done", task=task, start_ns=at_ns, end_ns=at_ns, iterations=self.iterations, wrong=0)


class PacedLab(RankLab):
    engine = PacedEngine

    def __init__(self, ends):
        super().__init__(lambda engine: engine.over())
        self.ends = ends


def test_inference_one_group_prefills_and_then_decodes_token_by_token():
    spec = InferenceSpec(tokens=3, prefill_ms=5, decode_ms=2, prefill_bytes=1 << 16, decode_bytes=1 << 12)
    trace = inference.request(spec, 4)
    assert [
        (operation.members, operation.size_bytes, operation.pauses_ns[0] // MS) for operation in trace.operations
    ] == [
        ((0, 1, 2, 3), 1 << 16, 5),
        *[((0, 1, 2, 3), 1 << 12, 2)] * 3,
    ]


def test_inference_split_groups_send_each_prefill_cache_to_a_decode_rank():
    trace = inference.request(InferenceSpec(tokens=1, prefill_ranks=3), 5)
    assert [operation.members for operation in trace.operations] == [(0, 1, 2), (0, 3), (1, 4), (2, 3), (3, 4)]
    (batch,) = replay_batches.batches(trace, ReplaySpec(batch_bytes=1 << 28), NETWORK)
    assert batch.phases[-1] == (2, 1), "rank 3 gets two caches before it decodes"


def test_inference_times_are_the_slowest_ranks_and_slo_attainment_is_counted():
    """Prefill takes 10 ms. Each token then takes 3 ms (4 ms on host2), and twice that in the second request."""

    def ends(host, index, phases):
        each = (4 if host == "host2" else 3) * (1 + index)
        return [10 + each * number for number in range(phases)]

    spec = InferenceSpec(tokens=4, requests=2, slo_ttft_ms=15, slo_tpot_ms=5)
    result = inference.run(PacedLab(ends), spec)
    assert (result.outcome, result.requests_completed, result.wrong_elements) == ("completed", 2, 0)
    tolerance = 200 * MS  # the threads start one after the other
    assert 14 * MS <= result.ttft_ns[0] <= 14 * MS + tolerance
    assert result.tpot_ns == ((4 * MS,) * 3, (8 * MS,) * 3)
    assert result.tpot_p50_ns == 6 * MS
    assert result.slo_attainment <= 0.5, "the second one's tokens were late"
    assert inference.run(PacedLab(ends), InferenceSpec(tokens=4, requests=2)).slo_attainment == 1


@pytest.mark.parametrize(
    ("first_ms", "error_ms", "expected"),
    [(990, 0, (2, 0, 0)), (990, 20, (2, 1, 0)), (1010, 20, (1, 0, 1)), (1010, 5, (1, 0, 0)), (1000, 0, (2, 0, 0))],
)
def test_requests_within_the_clocks_error_of_their_objective_are_left_open(first_ms, error_ms, expected):
    kept = kept_of(
        [500 * MS, first_ms * MS, 999 * MS],
        [(5 * MS,), (), (50 * MS, 60 * MS)],  # the third request's tokens are late, whatever its first token
        slo_ttft_ms=1000,
        slo_tpot_ms=20,
        error_ns=error_ms * MS,
    )
    assert (kept.requests, kept.may_have_missed, kept.may_have_kept) == expected


def test_inference_attainment_range_holds_what_the_clocks_leave_open():
    ends = [10, 11, 12, 13, 14]
    result = inference.run(PacedLab(lambda *_: ends), InferenceSpec(tokens=4, requests=2))
    late = replace(
        result, spec=replace(result.spec, slo_ttft_ms=1000), ttft_ns=(990 * MS, 1010 * MS), clock_error_ns={"host1": 0}
    )
    assert late.slo_attainment_range == (0.5, 0.5)
    assert replace(late, clock_error_ns={"host1": 0, "host2": 10 * MS}).slo_attainment_range == (0.0, 1.0)


def test_ranking_hot_shards_send_more_and_receive_as_many_gradients():
    trace = ranking.step(RankingSpec(embedding_bytes=4000, skew=1.0), 4)
    forward, backward, dense = trace.operations
    assert forward.collective == backward.collective == "all-to-allv"
    assert forward.counts == tuple(zip(*backward.counts, strict=True))
    sent = [sum(row) for row in forward.counts]
    assert sent == sorted(sent, reverse=True)
    assert sent[0] > 3 * sent[3]
    assert {sum(row) for row in zip(*forward.counts, strict=True)} == {4000}
    assert dense.collective == "all-reduce"


def test_ranking_job_reports_its_phases_and_its_mmr():
    result = ranking.run(PacedLab(lambda host, index, phases: [10, 30, 35]), RankingSpec(skew=0, iterations=3))
    assert (result.forward_ns, result.backward_ns, result.dense_ns) == (10 * MS, 20 * MS, 5 * MS)
    assert (result.iterations_completed, result.iteration_p99_ns) == (3, 35 * MS)
    assert result.mmr == pytest.approx(1.0)
    assert ranking.run(PacedLab(lambda *_: [1, 2, 3]), RankingSpec(skew=1)).mmr > 1.5


@pytest.mark.parametrize(
    ("module", "spec", "message"),
    [
        (inference, InferenceSpec(tokens=0), "1 to 200 tokens"),
        (inference, InferenceSpec(requests=0), "at least 1 request"),
        (inference, InferenceSpec(prefill_ranks=3), "groups of at least 2 ranks, got 3 and 1 of 4"),
        (inference, InferenceSpec(decode_bytes=6), "decode_bytes must be a multiple of 4"),
        (inference, InferenceSpec(slo_ttft_ms=-1), "slo_ttft_ms cannot be negative"),
        (inference, InferenceSpec(tokens=1, slo_tpot_ms=5), "slo_tpot_ms needs at least 2 tokens"),
        (ranking, RankingSpec(embedding_bytes=0), "embedding_bytes must be a multiple of 4 above 0"),
        (ranking, RankingSpec(skew=-1), "cannot be negative"),
        (ranking, RankingSpec(iterations=0), "at least 1 iteration"),
        (ranking, RankingSpec(embedding_bytes=8), "at least one element for each"),
        (ranking, RankingSpec(ranks=("host1:rxe0",)), "at least 2 ranks"),
    ],
)
def test_replay_refusals_come_before_anything_starts(module, spec, message):
    with pytest.raises(UsageError, match=message):
        module.run(NothingStarts(), spec)
