"""Traffic over real queue pairs: collectives by every algorithm, ranks that go away, a job, flows of every kind.

For both kinds of lab; not yet run on hardware.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waiting import until

from faultbed.testbed.model.selectors import select_one
from faultbed.traffic import traces
from faultbed.traffic.engine import traffic_metrics
from faultbed.traffic.engine.engine_client import Engines
from faultbed.traffic.engine.task_specs import QpParams
from faultbed.traffic.flows import flow_run, matrix
from faultbed.traffic.flows.flow_run import FlowSpec
from faultbed.traffic.schedules import ALGORITHMS
from faultbed.traffic.workloads import collective, inference, job, ranking, ranks, recording, replay
from faultbed.traffic.workloads.collective import CollectiveSpec
from faultbed.traffic.workloads.inference import InferenceSpec
from faultbed.traffic.workloads.job import JobPhase, JobSpec
from faultbed.traffic.workloads.ranking import RankingSpec
from faultbed.traffic.workloads.replay_batches import ReplaySpec
from faultbed.traffic.workloads.storage_service import Storage

pytestmark = [pytest.mark.needs("rdma", "hosts >= 4")]

RANKS = tuple(f"host[{number}]:rnic[0]" for number in range(4))

PATIENT = QpParams(timeout=18)
"""An ACK timeout of 1.07 s: on a busy machine a virtual CPU that pauses is not a lost packet."""

DATA = Path(__file__).resolve().parents[1] / "data" / "traces"
TYPES = ("fp32", "fp16", "bf16", "int32")
REDOPS = ("sum", "max", "avg")


@pytest.fixture
def engines(lab):
    """Start one engine on each of the first four hosts, for all runs of a test: that takes longer than a run."""
    with Engines.start(lab, [host.name for host in lab.topology.hosts[:4]]) as started:
        yield started


def test_every_algorithm_gives_the_right_result(lab, engines, subtests):
    """Each algorithm runs with uneven blocks, several segments per block, few slots and another type and reduction."""
    for number, (name, algorithm) in enumerate(ALGORITHMS):
        dtype = TYPES[number % len(TYPES)]
        elements = 20_000 if name == "all-to-all" else 20_003
        spec = CollectiveSpec(
            collective=name,
            algorithm=algorithm,
            ranks=RANKS,
            dtype=dtype,
            redop=REDOPS[number % len(REDOPS)],
            root=number % 4,
            skew=0.7,
            size_bytes=elements * ranks.ITEM_BYTES[dtype],
            segment_bytes=8192,
            slots=4,
            iterations=2,
            qp=PATIENT,
        )
        result = collective.start(lab, spec, engines=engines).wait(120.0)
        with subtests.test(collective=name, algorithm=algorithm, dtype=dtype, redop=spec.redop):
            assert result.outcome == "completed", result.where
            assert result.wrong_elements == 0
            assert result.iterations_completed == 2
            assert result.checked_elements >= 2 * (16 if name == "barrier" else elements)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signal", "deadline_s", "message"), [("KILL", 60.0, "engine is gone"), ("STOP", 6.0, "not over after")]
)
def test_lost_rank_is_a_typed_failure_of_all_other_ranks(lab, signal, deadline_s, message):
    """A killed rank is detected at once, a stopped one at its peers' deadline: its kernel keeps acknowledging."""
    hosts = [host.name for host in lab.topology.hosts[:4]]
    with Engines.start(lab, hosts) as engines:
        spec = CollectiveSpec(ranks=RANKS, size_bytes=1 << 17, duration_s=300.0, deadline_s=deadline_s, qp=PATIENT)
        running = collective.start(lab, spec, engines=engines)
        wait_for_iterations(running, 2 * len(hosts))
        before = running.dump()
        victim = str(engines.pids[hosts[2]])
        lab.node(hosts[2]).run(["kill", f"-{signal}", victim])
        began = time.monotonic()
        try:
            result = running.wait(120.0)
        finally:
            lab.node(hosts[2]).run(["kill", "-KILL", victim], check=False)
        took_s = time.monotonic() - began

    assert result.outcome == "failed"
    assert message in result.where
    assert took_s < deadline_s + 20.0, "its end is to come by the deadline"
    assert [end.outcome for end in result.ends] == ["failed"] * 4
    assert result.ends[2].where == "its engine sent no flight recorder at the end"
    for rank in (0, 1, 3):
        assert result.ends[rank].where.startswith("iteration ")
    assert any("waits for segment" in end.where for end in result.ends)
    assert result.wrong_elements == 0
    # The recorders tell the same story: of all ranks while they ran, of those that were left at the end.
    assert sorted(flight.rank for flight in before.values()) == [0, 1, 2, 3]
    assert sorted(flight.rank for flight in result.flights) == [0, 1, 3]
    for flight in result.flights:
        assert {"begin", "post", "ack", "arrive", "apply"} <= {entry.what for entry in flight.entries}
        times = [entry.at_ns for entry in flight.entries]
        assert times == sorted(times)


def wait_for_iterations(running, count):
    until(lambda: sum(event.name == "iteration" for event in list(running.events)) >= count, within_s=60.0)


def test_job_two_by_two_grid_reduces_along_both_dimensions(lab):
    """Two tensor-parallel groups at once, then two data-parallel ones; each phase has its time in each group.

    Every iteration waits for its data, every second one is checkpointed, over the front end.
    """
    spec = JobSpec(
        ranks=RANKS,
        grid=(("tp", 2), ("dp", 2)),
        phases=(
            JobPhase(along="tp", collective="all-reduce", size_bytes=1 << 16),
            JobPhase(along="dp", collective="reduce-scatter", size_bytes=1 << 17),
            JobPhase(along="dp", collective="all-gather", size_bytes=1 << 17),
        ),
        iterations=4,
        compute_units=2,
        storage=Storage(host=lab.topology.hosts[3].name, ingest_bytes=1 << 16, checkpoint_bytes=1 << 18, every=2),
        qp=PATIENT,
    )
    with job.start(lab, spec) as running:
        result = running.wait(120.0)
    assert result.outcome == "completed", result.where
    assert sorted((checkpoint.rank, checkpoint.iteration) for checkpoint in result.checkpoints) == [
        (r, i) for r in range(4) for i in (1, 3)
    ]
    assert result.wrong_elements == 0
    assert result.iterations_completed == 4
    assert [(group.phase, group.members) for group in result.groups] == [
        (0, (0, 1)),
        (0, (2, 3)),
        (1, (0, 2)),
        (1, (1, 3)),
        (2, (0, 2)),
        (2, (1, 3)),
    ]
    assert all(group.time_ns > 0 and group.busbw_gbytes_per_s > 0 for group in result.groups)
    for rank in result.iterations:
        for item in rank:
            assert item.compute_ns > 0
            assert item.ingest_ns > 0
            assert (item.checkpoint_ns > 0) is (item.index in (1, 3))
            spent_ns = item.ingest_ns + item.compute_ns + item.comm_ns + item.checkpoint_ns
            assert spent_ns <= item.end_ns - item.start_ns
            assert item.phases_ns == tuple(sorted(item.phases_ns))


def test_flows_of_every_kind_carry_their_specified_load(lab, engines, subtests):
    """Message counts per QP, results of atomics, rates and bursts match the flow specs."""
    rnics = [select_one(lab.topology, rank) for rank in RANKS]
    src, dst = rnics[0], rnics[-1]

    def run(*specs):
        requests = [FlowSpec(**{"src": src, "dst": dst, "qp": PATIENT, **spec}) for spec in specs]
        result = flow_run.start_all(lab, requests, engines=engines).wait(120.0)
        assert result.outcome == "completed", result.where
        return result.flows

    # Messages are counted, not timed, so that the flows of a kind run at once.
    verbs = ("write", "send", "read", "write-imm")
    bulk = {"message_bytes": 16384, "qps": 2, "depth": 4, "messages": 240}
    for one in run(*({"verb": verb, **bulk} for verb in verbs)):
        with subtests.test(verb=one.spec.verb):
            assert one.messages == 240
            assert one.size_bytes == 240 * 16384
            assert [total.messages for total in one.totals] == [120, 120]
    bulk |= {"message_bytes": 10_007, "messages": 120, "check": True}
    for one in run(*({"verb": verb, **bulk} for verb in flow_run.CHECKED["rc"])):
        with subtests.test(verb=one.spec.verb, check=True):
            assert (one.messages, one.checked_bytes, one.wrong_bytes) == (120, 120 * 10_007, 0)
    unreliable = [{"transport": name, "verb": verb} for name, verb in (("uc", "write"), ("uc", "send"), ("ud", "send"))]
    paced = {"message_bytes": 4096, "rate_bps": 4e6, "messages": 100, "qps": 2}
    for one in run(*({**kind, **paced} for kind in unreliable)):
        with subtests.test(transport=one.spec.transport, verb=one.spec.verb):
            assert one.sent == 100
            assert one.messages == 100, "more receives are posted, and the fabric loses nothing unasked"
            assert one.size_bytes == 100 * 4096
            assert one.rebuilds == ()
    sizes = {"uc": 10_007, "ud": 4096}
    checked = [{**kind, **paced, "message_bytes": sizes[kind["transport"]], "check": True} for kind in unreliable]
    for one in run(*checked):
        with subtests.test(transport=one.spec.transport, verb=one.spec.verb, check=True):
            assert (one.sent, one.messages, one.rebuilds) == (100, 100, ())
            assert (one.checked_bytes, one.wrong_bytes) == (100 * sizes[one.spec.transport], 0)
    with subtests.test(admit=2):
        requests = {"message_bytes": 65536, "depth": 8, "chain": 4, "messages": 40, "admit": 2}
        many = run(*({**requests, "src": rnic, "dst": src} for rnic in rnics[1:]))
        assert [one.messages for one in many] == [40] * 3
        # Everybody has a turn after every turn: who begins last is not through much later than who begins first.
        requests |= {"messages": None, "duration_s": 2.0, "dst": src}
        timed = run(*({**requests, "src": rnic} for rnic in rnics[1:]))
        assert traffic_metrics.jain_index([one.messages for one in timed]) > 0.9
    with subtests.test(verb="atomic"):
        (one,) = run({"verb": "atomic", "message_bytes": 8, "messages": 200})
        assert (one.messages, one.last_value) == (200, 199)
    with subtests.test(spread="split"):
        (one,) = run({"message_bytes": 32768, "qps": 4, "spread": "split", "messages": 50})
        assert (one.messages, one.size_bytes) == (50, 50 * 32768)
        assert [total.size_bytes for total in one.totals] == [50 * 8192] * 4
    with subtests.test(spread="round-robin"):
        (one,) = run({"message_bytes": 4096, "qps": 3, "spread": "round-robin", "duration_s": 2.0, "chain": 1})
        counts = [total.messages for total in one.totals]
        assert max(counts) - min(counts) <= 1
    with subtests.test(pace="rate and bursts"):
        rate_bps, size = 2e6, 4096
        steady, bursts = run(
            {"message_bytes": size, "rate_bps": rate_bps, "duration_s": 4.0},
            {"message_bytes": size, "on_s": 0.5, "off_s": 1.0, "duration_s": 4.0, "dst": rnics[1]},
        )
        wanted = rate_bps * 4.0 / 8 / size
        assert 0.5 * wanted <= steady.messages <= 1.05 * wanted + 2
        by_sample = [sample.size_bytes for sample in bursts.samples if sample.endpoint == src]
        assert sum(size == 0 for size in by_sample) >= 0.35 * len(by_sample), by_sample
        assert sum(size > 0 for size in by_sample) >= 6, by_sample
    with subtests.test(pattern="incast, with a probe"):
        pairs = matrix.pairs("incast", rnics)
        long = [{"src": one, "dst": other, "duration_s": 3.0, "depth": 4} for one, other in pairs]
        probe = {"message_bytes": 64, "depth": 1, "latency": True, "rate_bps": 51200, "duration_s": 3.0}
        *flows, beside = run(*long, {**probe, "src": pairs[0][0], "dst": pairs[0][1]})
        assert all(flow.messages > 0 for flow in flows)
        assert beside.latency.count == beside.messages > 0
        assert 0 < beside.latency.p50_ns <= beside.latency.p99_ns <= beside.latency.max_ns


def test_replay_of_recorded_job_and_chakra_trace_matches(lab, engines, tmp_path):
    """A trace recorded from a run replays as the same operations, and its pauses are kept."""
    spec = JobSpec(
        ranks=RANKS,
        grid=(("tp", 2), ("dp", 2)),
        phases=(
            JobPhase(along="tp", collective="all-reduce", size_bytes=1 << 15),
            JobPhase(along="dp", collective="all-gather", size_bytes=1 << 16),
        ),
        iterations=2,
        qp=PATIENT,
    )
    with job.start(lab, spec, engines=engines) as running:
        recorded = recording.of_job(running.wait(120.0))
    traces.save(recorded, tmp_path / "job", form="chakra")
    result = replay.run(lab, ReplaySpec(ranks=RANKS, qp=PATIENT), traces.load(tmp_path / "job"), engines=engines)
    assert (result.outcome, result.wrong_elements) == ("completed", 0), result.where
    assert sorted((operation.collective, operation.members) for operation in result.operations) == sorted(
        (operation.collective, operation.members) for operation in recorded.operations
    )

    trace = traces.load(DATA / "tensor-parallel")
    quick, slow = (
        replay.run(
            lab, ReplaySpec(ranks=RANKS, qp=PATIENT, pauses=pauses, speed=0.01, repeat=2), trace, engines=engines
        )
        for pauses in (False, True)
    )
    for one in (quick, slow):
        assert (one.outcome, one.wrong_elements) == ("completed", 0), one.where
        assert [operation.collective for operation in one.operations] == [
            operation.collective for operation in trace.operations
        ]
    # 2 + 3 + 1 ms of compute, a hundred times slower, twice; no part of that is in what rank 0's operations took.
    assert (
        2 * sum(operation.time_ns for operation in slow.operations if 0 in operation.members)
        <= slow.time_ns - 2 * 600e6
    )


def test_inference_decodes_after_prefill_and_ranking_hot_shards_send_more(lab):
    """Prefill and decode on hosts of their own; a pause before each is in the time of the token that waits for it."""
    spec = InferenceSpec(
        ranks=RANKS, prefill_ranks=2, prefill_bytes=1 << 18, kv_bytes=1 << 17, decode_bytes=1 << 14, tokens=5,
        requests=3, prefill_ms=100, decode_ms=20, slo_tpot_ms=10, qp=PATIENT,
    )  # fmt: skip
    result = inference.run(lab, spec)
    assert (result.outcome, result.wrong_elements, result.requests_completed) == ("completed", 0, 3), result.where
    assert min(result.ttft_ns) >= 120e6 - max(result.clock_error_ns.values())
    assert min(time_ns for one in result.tpot_ns for time_ns in one) >= 20e6
    assert result.slo_attainment == 0, "no token can keep a promise of 10 ms that is computed for 20 ms"

    uneven = ranking.run(
        lab, RankingSpec(ranks=RANKS, embedding_bytes=1 << 18, skew=1.5, dense_bytes=1 << 15, iterations=3, qp=PATIENT)
    )
    assert (uneven.outcome, uneven.wrong_elements, uneven.iterations_completed) == ("completed", 0, 3), uneven.where
    assert uneven.mmr > 2


def test_full_mesh_on_healthy_lab_loses_no_queue_pair(lab):
    """All ranks send to all others at once, from the command line. This load alone used to cost 21 queue pairs."""
    words = ["traffic", "collective", "--algorithm", "full-mesh", "--iterations", "5", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "faultbed", "--lab", str(lab.inventory), *words],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    output = json.loads(done.stdout)
    assert (output["outcome"], output["wrong_elements"], output["qp_errors"]) == ("completed", 0, [])
