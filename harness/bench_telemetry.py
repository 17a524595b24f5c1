"""Part of the bench: what watching the lab costs its traffic. Pairs of flows by turns, one watched and one not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np

from harness.statistics import percentile_interval
from testbed import telemetry
from testbed.errors import LabError
from testbed.lab import Lab
from traffic import flow
from traffic.bench import PATIENT
from traffic.flow import FlowSpec

__all__ = ["measure"]

PAIRS, SECONDS, MESSAGE_BYTES = 12, 8.0, 65536
GRACE_S = 60.0
MOST_COST = 0.01
LEVEL = 0.95


def measure(lab: Lab, src: str, dst: str, mark: Callable[[bool], str]) -> Iterator[tuple[str, ...]]:
    """Goodput of a flow while all machines are watched as in a run, over the one right before or after it.

    Raises:
        LabError: a flow did not end as it should.
    """
    spec = FlowSpec(src=src, dst=dst, message_bytes=MESSAGE_BYTES, duration_s=SECONDS, qp=PATIENT)
    ratios = []
    for number in range(PAIRS):
        found = {
            watched: _goodput(lab, spec, watched=watched) for watched in ((True, False), (False, True))[number % 2]
        }
        ratios.append(found[True] / found[False])
    middle = float(np.median(ratios))
    interval = percentile_interval(np.array(ratios), 50, level=LEVEL)
    if interval is None:
        raise LabError(f"bench: {PAIRS} pairs are too few for an interval")
    spread = f"{interval.low:.3f}..{interval.high:.3f} ({interval.level:.0%}), n={PAIRS}"
    goal = 1 - MOST_COST
    yield "goodput watched / not watched", f"{middle:.3f}", spread, f">= {goal:g}", mark(middle >= goal)


def _goodput(lab: Lab, spec: FlowSpec, *, watched: bool) -> float:
    with contextlib.ExitStack() as stack:
        if watched:
            stack.enter_context(telemetry.start(lab))
        result = flow.start(lab, spec).wait(SECONDS + GRACE_S)
    if result.outcome == "failed":
        raise LabError(f"bench: the flow failed: {result.where}")
    return result.goodput_bps
