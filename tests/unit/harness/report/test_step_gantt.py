"""The Gantt chart around a fault: bars of each rank, which bar is the stall, and the text about it."""

from __future__ import annotations

import re
from dataclasses import replace

import msgspec
import pytest
from finished_run import finished, parsed
from state_windows import window
from synthetic_run import MS, T0, S, changed, lost_at, synthetic_run

from faultbed.harness.attribution.packet_stalls import Wait
from faultbed.harness.attribution.stalls import stalls
from faultbed.harness.findings import Attribution
from faultbed.harness.record.evidence.workload_evidence import Iteration, Rank, RankSeries
from faultbed.harness.report import run_page as report
from faultbed.harness.report.plots.charts import Band
from faultbed.harness.report.plots.gantt_plot import gantt_chart
from faultbed.harness.report.plots.step_gantt import MOST_ROWS, Bar, gantts
from faultbed.traffic.engine.flight_recorder import Entry, Flight

LONG_S = 2.0


def steps(count, *, long=None, compute_ms=100, comm_ms=100):
    """Iterations of 0.2 s after each other; `long` is an iteration and the part of it that takes `LONG_S`."""
    collected, at_ns = [], T0
    for index in range(count):
        parts = {"compute_ns": compute_ms * MS, "wait_ns": 0, "comm_ns": comm_ms * MS}
        if long is not None and long[0] == index:
            parts[long[1]] = round(LONG_S * S)
        collected.append(Iteration(index=index, start_ns=at_ns, **parts))
        at_ns = collected[-1].end_ns
    return tuple(collected)


def run_of(*by_rank, **others):
    return changed(
        synthetic_run(),
        series=tuple(RankSeries(rank=rank, iterations=each) for rank, each in enumerate(by_rank)),
        ranks=tuple(Rank(rank=rank, host=f"host{rank + 1}", rnic="rxe0") for rank in range(len(by_rank))),
        end_ns=T0 + 20 * S,
        **others,
    )


# Iteration 10 begins 2 s after the start, and so does the fault.
FAULT = window(start_s=2, end_s=3)
STALLED = run_of(steps(20, long=(10, "wait_ns")), steps(20, long=(10, "comm_ns")))


def one_of(run, **known):
    (result,) = gantts(run, [FAULT], recovered_ns={}, **known)
    return result


def test_gantt_iteration_is_its_phases_in_sequence():
    series = (
        Iteration(index=0, start_ns=T0 + S, ingest_ns=S, compute_ns=2 * S, wait_ns=0, comm_ns=S, checkpoint_ns=S),
    )
    gantt = one_of(run_of(series))

    assert gantt.rows[0].bars == (
        Bar(kind="ingest", iteration=0, start_s=1, end_s=2),
        Bar(kind="compute", iteration=0, start_s=2, end_s=4),
        Bar(kind="comm", iteration=0, start_s=4, end_s=5),
        Bar(kind="checkpoint", iteration=0, start_s=5, end_s=6),
    )
    assert gantt.kinds == ("ingest", "compute", "comm", "checkpoint")


def test_gantt_stall_is_the_late_rank_and_not_the_waiting_one():
    stall = one_of(STALLED).stall

    assert (stall.rank, stall.start_s, stall.end_s) == (1, pytest.approx(2.1), pytest.approx(4.1))
    assert stall.short == "iteration 10, 2 s"
    assert stall.words == "iteration 10: rank 1 (host2:rxe0) communicated 2 s, its median is 100 ms"


def test_gantt_chart_surrounds_the_stall():
    """From two and a half median iterations before the firing to three after the stall's end: 1.5 to 4.7 s."""
    gantt = one_of(STALLED)

    assert (gantt.start_s, gantt.end_s) == (pytest.approx(1.5), pytest.approx(4.7))
    assert all(bar.end_s > 1.5 and bar.start_s < 4.7 for row in gantt.rows for bar in row.bars)
    assert [row.name for row in gantt.rows] == ["host1:rxe0", "host2:rxe0"]


def test_gantt_stall_names_the_hop_of_a_queue_pair_that_died():
    """`lost_at` is host1 to host3; here rank 1 is host3."""
    run = changed(
        STALLED,
        qps_lost=(lost_at(T0 + 1 * S), lost_at(T0 + 3 * S)),
        ranks=(Rank(rank=0, host="host1", rnic="rxe0"), Rank(rank=1, host="host3", rnic="rxe0")),
        connections=(
            msgspec.structs.replace(
                synthetic_run().workload.connections[0],
                src="host1:rxe0",
                dst="host3:rxe0",
                path=("host1", "rtsw1", "ctsw2", "rtsw2", "host3"),
            ),
        ),
    )
    died = "; its queue pair host1:rxe0 → host3:rxe0 failed meanwhile (RETRY_EXC_ERR)"
    link = Attribution(cause="link-down", place="link", name="rtsw1:ctsw2", confidence=0.9, evidence=())

    assert one_of(run).stall.words.endswith(f"{died} over host1 → rtsw1 → ctsw2 → rtsw2 → host3")
    assert one_of(run, findings=[link]).stall.words.endswith(f"{died}, stalled at rtsw1:ctsw2")


def test_gantt_stall_from_a_capture_names_the_packet_wait():
    wait = Wait(
        iteration=10, sender=1, receiver=0, waited_ns=S, until_ns=T0 + 4 * S, words="rank 1→0 waited 1 s for a timer"
    )
    other = Wait(iteration=3, sender=0, receiver=1, waited_ns=9 * S, until_ns=T0 + S, words="another")
    stall = one_of(STALLED, waits=[other, wait]).stall

    assert (stall.rank, stall.start_s, stall.end_s, stall.words) == (0, 3, 4, wait.words)
    assert stall.short == "rank 1→0, 1 s"
    unknown = replace(wait, sender=None, receiver=None, words="host2:rxe0→host1:rxe0 waited 1 s for a timer")
    assert one_of(STALLED, waits=[unknown]).stall == one_of(STALLED).stall, "an RNIC with several ranks names no row"


def entry(what, at_s, iteration, **values):
    return Entry(
        at_ns=T0 + round(at_s * S),
        what=what,
        iteration=iteration,
        **{"step": -1, "peer": -1, "qpn": 0, "segment": -1, "psn": -1, **values},
    )


def flight(rank, standing, *entries):
    return Flight(rank=rank, endpoint=f"host{rank + 1}:rxe0", standing=standing, entries=entries)


def test_gantt_continues_with_flight_recorders_after_the_last_iteration():
    """The reported ones end at 2 s; the recorder's iteration 11 was the last of them, 12 ended, 13 did not."""
    known = flight(
        0,
        "iteration 13, compute",
        entry("begin", 1.8, 11),
        entry("end", 2.0, 11),
        entry("begin", 2.0, 12),
        entry("end", 2.3, 12),
        entry("begin", 2.4, 13),
        entry("ack", 3.0, 13),
    )
    run = changed(run_of(steps(10)), end_ns=T0 + 3 * S)
    gantt = one_of(run, flights=[known])

    assert [bar for bar in gantt.rows[0].bars if bar.kind in {"whole", "open"}] == [
        Bar(kind="whole", iteration=12, start_s=2.0, end_s=2.3),
        Bar(kind="open", iteration=13, start_s=2.4, end_s=3.0),
    ]
    assert gantt.stall.words == "iteration 13, rank 0 (host1:rxe0): 0.60 s, and it did not end"


def test_gantt_stall_from_flight_recorders_uses_their_description():
    standing = "iteration 12, step 3: waits for segment 2 of 8 from rank 1 (QP 17)"
    flights = [
        flight(0, standing, entry("begin", 2.0, 12), entry("arrive", 2.5, 12, peer=1, qpn=17)),
        flight(1, "iteration 12, compute", entry("begin", 2.0, 12), entry("ack", 3.5, 12, peer=0)),
    ]
    actual = [(one, one.describe(("host2", "rtsw1", "host1"))) for one in stalls(flights)]
    run = changed(run_of(steps(10), steps(10)), end_ns=T0 + round(3.5 * S))
    stall = one_of(run, flights=flights, stalled=actual).stall

    assert (stall.rank, stall.start_s, stall.end_s) == (0, 2.5, 3.5)
    assert stall.short == "step 3, rank 1→0"
    assert stall.words == actual[0][1]
    assert "over host2 → rtsw1 → host1" in stall.words


def test_gantt_stall_is_the_one_rank_without_a_recording():
    flights = [flight(0, "iteration 12, compute", entry("begin", 2.0, 12), entry("ack", 3.0, 12))]
    run = changed(run_of(steps(10), steps(9)), end_ns=T0 + 3 * S)
    stall = one_of(run, flights=flights).stall

    assert (stall.rank, stall.start_s, stall.end_s) == (1, pytest.approx(1.8), 3.0)
    assert "rank 1 (host2:rxe0) left no recording" in stall.words


def test_gantt_of_many_ranks_shows_the_stalled_and_the_longest():
    run = run_of(*(steps(20, long=(10, "comm_ns") if rank == 39 else None) for rank in range(40)))
    gantt = one_of(run)

    assert len(gantt.rows) == MOST_ROWS
    assert 39 in [row.rank for row in gantt.rows]


def test_gantt_needs_a_fault_and_iterations():
    assert gantts(STALLED, [], recovered_ns={}) == ()
    assert gantts(run_of((), ()), [FAULT], recovered_ns={}) == ()
    assert gantts(STALLED, [window(start_s=15, end_s=16)], recovered_ns={}) == ()


@pytest.mark.usefixtures("drawn_anew")
def test_gantt_chart_has_a_row_per_rank_and_frames_the_stall():
    chart = gantt_chart(one_of(STALLED), [Band(start_s=2, end_s=3, number=1, colour="#d1495b")])

    for svg in (chart.wide, chart.narrow):
        parsed(svg)
        assert "host1:rxe0" in svg
        assert "▼ iteration 10, 2 s" in svg
        assert "var(--fail)" in svg
        assert not re.search(r"#0[0-9a]0[0-9a]0[0-9a]", svg)


def test_report_has_a_gantt_chart_for_each_fault(tmp_path):
    page = report.render(finished(tmp_path, synthetic_run()).path).read_text(encoding="utf-8")

    assert page.count('<figure class="gantt') == 3
    # The ring stalled during the flap, and rank 1 computed longer during the throttle.
    assert re.search(r"iteration \d+: rank \d \(host\d:rxe0\) communicated 1\.\d+ s, its median is", page)
    assert re.search(r"rank 1 \(host2:rxe0\) computed", page)
