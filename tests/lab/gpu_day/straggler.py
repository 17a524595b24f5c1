"""Slow the compute phases of one of four ranks by noisy neighbours, and let both detectors find it.

    python tests/lab/gpu_day/straggler.py OUT

There is one GPU, so the ranks compute in turn: each alone, as on a GPU of its own. Neighbours (the fault's own
processes) run during the turns of rank 1 alone, and are stopped (SIGSTOP) during the others. Two strengths: `whole`,
neighbours during the whole phase; `burst`, for a part of it, after which they still end what they have queued.
"""

from __future__ import annotations

import os
import signal
import time
from statistics import median

import day
import gpu_rank

from faultbed.harness.analysis.ranks import straggler
from faultbed.harness.analysis.ranks.fail_slow import Detector
from faultbed.harness.record.evidence.workload_evidence import Iteration, RankSeries
from faultbed.inject.node.actuator import make
from faultbed.inject.node.machine.hog import busy_processes

RANKS, SLOW_RANK, UNITS = 4, 1, 20
HEALTHY, SLOW = 70, 24
DRAIN_S = 0.05
"""After neighbours are stopped: they have queued 11 ms of work on an H100."""
BURST_S = 0.01


class Neighbours:
    def __init__(self, pcie, count):
        self.actuator = make("gpu_neighbour", {"pcie": pcie, "count": count})
        self.actuator.prepare()
        self.actuator.on()
        self.pids = busy_processes()
        self.stop()
        time.sleep(DRAIN_S)

    def stop(self):
        for pid in self.pids:
            os.kill(pid, signal.SIGSTOP)

    def go(self):
        for pid in self.pids:
            os.kill(pid, signal.SIGCONT)

    def end(self):
        self.actuator.off()


def took_s(rank, neighbours, strength):
    """Return how long a rank's phase took: alone, or beside neighbours."""
    if strength is None:
        return rank.took_s(UNITS)
    if strength == "whole":
        neighbours.go()
    rank.start(UNITS)
    if strength == "burst":
        neighbours.go()
        time.sleep(BURST_S)
        neighbours.stop()
    seconds = rank.finish()
    neighbours.stop()
    time.sleep(DRAIN_S)
    return seconds


def iterations(ranks, neighbours, count, strength):
    """Return the compute times of `count` iterations in ns, one row for each, and when each phase began."""
    rows, begins = [], []
    for _ in range(count):
        row, begun = [], []
        for number, rank in enumerate(ranks):
            begun.append(time.monotonic_ns())
            row.append(round(took_s(rank, neighbours, strength if number == SLOW_RANK else None) * 1e9))
        rows.append(row)
        begins.append(begun)
    return rows, begins


def detected(rows, first_slow):
    """Return what the fail-slow detector says of rows of compute times: alarms, and the delay in iterations. Pure."""
    detector = Detector(len(rows[0]))
    alarms = [alarm for row in rows for alarm in detector.add(row)]
    return [
        {"rank": a.rank, "iteration": a.iteration, "delay": a.iteration - first_slow + 1, "slowdown": a.slowdown}
        for a in alarms
    ]


def judged(rows, first_slow, last_slow):
    """Return what the straggler test says of a fault from one iteration to another: rank, ratio, is it sure. Pure."""
    each_ns = 10 * max(map(max, rows))
    series = tuple(
        RankSeries(
            rank=rank,
            iterations=tuple(
                Iteration(index=at, start_ns=at * each_ns, compute_ns=row[rank], comm_ns=1, wait_ns=0)
                for at, row in enumerate(rows)
            ),
        )
        for rank in range(len(rows[0]))
    )
    slow = straggler.slowdowns(series, {"neighbour": (first_slow * each_ns, (last_slow + 1) * each_ns)})
    top, is_sure = straggler.slowest(slow)
    return None if top is None else {"rank": top.rank, "ratio": top.ratio, "is_sure": is_sure, "chance": top.chance}


def is_right(top, rows):
    """Return whether the straggler test names the slow rank, or, of less than its smallest ratio, none. Pure."""
    healthy, slow = (median(row[SLOW_RANK] for row in part) for part in (rows[:HEALTHY], rows[HEALTHY:]))
    if top is None:
        return slow / healthy < straggler.RATIO
    return top["rank"] == SLOW_RANK and top["is_sure"]


def main():
    pcie = gpu_rank.first_pcie()
    neighbours = Neighbours(pcie, 2)
    ranks = [gpu_rank.Rank(pcie) for _ in range(RANKS)]
    results, checks = {}, []
    try:
        for rank in ranks:
            rank.took_s(gpu_rank.WARM)
        for strength in ("whole", "burst"):
            healthy, begins = iterations(ranks, neighbours, HEALTHY, None)
            slow, more = iterations(ranks, neighbours, SLOW, strength)
            rows = healthy + slow
            alarms, top = detected(rows, HEALTHY), judged(rows, HEALTHY, len(rows) - 1)
            results[strength] = {"rows_ns": rows, "begins_ns": begins + more, "alarms": alarms, "straggler": top}
            early = [alarm for alarm in alarms if alarm["delay"] < 1]
            named = [alarm["rank"] for alarm in alarms if alarm["delay"] >= 1]
            checks += [
                (f"{strength}: false alarms in {HEALTHY} healthy iterations: {early}", not early),
                (f"{strength}: fail-slow names rank {SLOW_RANK}: {alarms}", named == [SLOW_RANK]),
                (f"{strength}: straggler test: {top}", is_right(top, rows)),
            ]
    finally:
        for rank in ranks:
            rank.close()
        neighbours.go()
        neighbours.end()
        day.save("straggler.json", ranks=RANKS, units=UNITS, healthy=HEALTHY, slow=SLOW, results=results)
    checks.append(("no neighbour is left", not busy_processes() & neighbours.pids))
    day.conclude(checks)


if __name__ == "__main__":
    main()
