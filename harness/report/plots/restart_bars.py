"""Positions of the phase bars of a job's restarts, and of their bounds. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from faultbed.harness.analysis.phases import Phase
from faultbed.harness.analysis.restarts import TimedRestart
from faultbed.harness.report.plots.recovery_bars import PhaseBar
from faultbed.harness.verdict import Check
from faultbed.traffic.workloads.elastic.elastic_results import Restart

__all__ = ["RestartBar", "restart_bars"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartBar:
    """A restart, with the bars of its phases on the scale of the longest restart.

    `is_open`: its last bar is that of a phase that another loss or the end of the run cut short.
    """

    restart: Restart
    words: str
    length_ns: int
    phases: tuple[PhaseBar, ...]
    is_open: bool = False


def restart_bars(restarts: Sequence[TimedRestart], checks: Sequence[Check]) -> tuple[RestartBar, ...]:
    """Return the bars of all restarts, all on one scale."""
    bounds = {
        check.name: float(check.bound)
        for check in checks
        if check.name.startswith("restart.") and isinstance(check.bound, int | float) and check.comparison == "max"
    }
    whole_ns = max((_length_ns(_phases(timed)) for timed in restarts), default=0) or 1
    return tuple(_bar(timed, bounds, whole_ns) for timed in restarts)


def _open_phase(timed: TimedRestart) -> Phase | None:
    return timed.interrupted or timed.unfinished


def _phases(timed: TimedRestart) -> tuple[Phase, ...]:
    """Return the phases to draw: the completed ones, and the one that was cut short."""
    cut = _open_phase(timed)
    return timed.phases if cut is None else (*timed.phases, cut)


def _length_ns(phases: Sequence[Phase]) -> int:
    return phases[-1].end_ns - phases[0].start_ns


def _bar(timed: TimedRestart, bounds: Mapping[str, float], whole_ns: int) -> RestartBar:
    drawn = _phases(timed)
    begin_ns = drawn[0].start_ns
    bars = []
    for phase in drawn:
        bound_s = bounds.get(f"restart.{phase.name}")
        left = 100 * (phase.start_ns - begin_ns) / whole_ns
        bound_left = None if bound_s is None else left + 100 * bound_s * 1e9 / whole_ns
        bars.append(
            PhaseBar(
                phase=phase,
                left=left,
                width=100 * phase.length_ns / whole_ns,
                bound_s=bound_s,
                bound_left=bound_left if bound_left is not None and bound_left <= 100 else None,  # noqa: PLR2004
                broken=bound_s is not None and phase.length_ns > bound_s * 1e9,
                is_open=phase is _open_phase(timed),
            )
        )
    return RestartBar(
        restart=timed.restart,
        words=timed.describe(),
        length_ns=_length_ns(drawn),
        phases=tuple(bars),
        is_open=_open_phase(timed) is not None,
    )
