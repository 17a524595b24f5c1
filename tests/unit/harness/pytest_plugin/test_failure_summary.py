"""The summary of a failed test: outcome, longest iterations, lost queue pairs and waiting ranks of its workload."""

from __future__ import annotations

from types import SimpleNamespace

from faultbed.harness.pytest_plugin.failure_summary import summary_of
from faultbed.traffic.engine.engine_client import Event
from faultbed.traffic.engine.run_results import QpError

S = 1_000_000_000


def iteration(rank, index, start_s, length_s, **parts):
    message = {"event": "iteration", "task": f"rank{rank}", "index": index, "start_ns": int(start_s * S)}
    message |= {"end_ns": int((start_s + length_s) * S)} | {f"{name}_ns": int(s * S) for name, s in parts.items()}
    return Event(host=f"host{rank}", message=message)


def running(*, over, events=(), errors=(), failure=None):
    flight = SimpleNamespace(rank=1, endpoint="host2:rxe0", standing="iteration 7, compute")
    return SimpleNamespace(
        plan=SimpleNamespace(what="ring of 2"),
        is_over=over,
        outcome="failed" if failure else "completed",
        failure=failure,
        started_ns=0,
        events=list(events),
        qp_errors=errors,
        rebuilds=(),
        dump=lambda: {"rank1": flight},
    )


def test_failure_summary_lists_the_longest_iterations_with_each_ranks_phases():
    events = [iteration(rank, index, index, 0.5, compute=0.2, comm=0.1) for rank in (0, 1) for index in range(6)]
    events += [iteration(0, 6, 6, 30, compute=0.2, wait=29.5), iteration(1, 6, 6, 30, compute=29.8)]
    text = summary_of(running(over=True, events=events))
    assert text.splitlines()[0] == "ring of 2: completed"
    assert "7 iterations; the longest:" in text
    assert "6, at 6.0 s, 30.00 s: rank0 compute 0.20, wait 29.50 s; rank1 compute 29.80 s" in text
    assert "who" not in text


def test_failure_summary_lists_lost_queue_pairs_and_waiting_ranks():
    error = QpError(
        time_ns=2 * S,
        connection=0,
        endpoint="host1:rxe0",
        peer="host2:rxe0",
        qpn=17,
        status="RETRY_EXC_ERR",
        generation=0,
    )
    text = summary_of(running(over=False, errors=(error,)))
    assert "QP failed at 2.0 s: host1:rxe0 to host2:rxe0, RETRY_EXC_ERR" in text
    assert "rank 1 on host2:rxe0: iteration 7, compute" in text
    assert "not over" in text


def test_failure_summary_of_a_failed_workload_has_the_reason():
    assert summary_of(running(over=True, failure="host3: gone")).startswith("ring of 2: failed, host3: gone")
