"""What a run saw of its stop conditions: `evidence/measured/stops.json`. All times are the controller's, in ns."""

from __future__ import annotations

import msgspec

__all__ = ["Held", "StopsEvidence", "Watched"]


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A condition that ended the run: its last value, since when it had held, and when that was seen."""

    value: float
    since_ns: int
    at_ns: int


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one condition.

    Attributes:
        metric: its metric, with `bound` and `for_ns` as in the experiment.
        last_value: the last known value; None: it was never known.
        known_ns: when it had a known value first and last.
        largest_gap_ns: the longest time between two known values, its expected begin and its end included.
        may_have_held_ns: a time for which it may have held: no known value in it refutes that, but some are unknown.
        held: it ended the run.
        missing_ns: since when its data were missing and when that was seen, if that ended the run.
    """

    metric: str
    bound: float
    for_ns: int
    last_value: float | None = None
    known_ns: tuple[int, int] | None = None
    largest_gap_ns: int = 0
    may_have_held_ns: tuple[int, int] | None = None
    held: Held | None = None
    missing_ns: tuple[int, int] | None = None


class StopsEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Every condition that was evaluated while faults were on.

    `refused` is why no fault was armed: what was wrong with the workload before the first one. `t0_ns` is when the
    workload began.
    """

    t0_ns: int
    conditions: tuple[Watched, ...] = ()
    refused: str | None = None
