"""Each phase has its own bar and its own bound, on the scale of its recovery."""

from __future__ import annotations

import msgspec
import pytest
from finished_run import finished
from synthetic_run import T0, S, synthetic_run

from faultbed.harness.analysis.phases import Phase
from faultbed.harness.analysis.timeline import Impact
from faultbed.harness.report import run_page as report
from faultbed.harness.report.plots.recovery_bars import phase_bars
from faultbed.harness.verdict import Check


def impact(took_s=4):
    return Impact(
        fired_ns=T0,
        cleared_ns=T0 + S,
        recovered_ns=T0 + took_s * S,
        recovery_ns=took_s * S,
        after_clear_ns=(took_s - 1) * S,
        censored=False,
        min_ratio=0.1,
        lost_bytes=1,
    )


def phase(name, start_s, end_s):
    start_ns, end_ns = T0 + round(start_s * S), T0 + round(end_s * S)
    return Phase(name=name, start_ns=start_ns, end_ns=end_ns, detail="", is_exact=start_ns == end_ns)


def check(name, bound, comparison="max"):
    return Check(name=name, verdict="PASS", observed=1, bound=bound, unit="s", comparison=comparison, detail="")


STEPS = (phase("detect", 0, 1), phase("qp_error", 0, 0), phase("hold", 1, 4))


def test_recovery_bars_and_ticks_share_one_scale():
    """Recovery takes 4 s. The bound of detect ends at 2 s, that of hold (which begins at 1 s) at 3 s."""
    detect, hold = phase_bars(STEPS, impact(), [check("recovery.detect", 2), check("recovery.hold", 2)])

    assert (detect.left, detect.width, detect.bound_s, detect.bound_left, detect.broken) == (0, 25, 2, 50, False)
    assert (hold.left, hold.width, hold.bound_s, hold.bound_left, hold.broken) == (25, 75, 2, 75, True)


def test_recovery_bars_scale_grows_for_a_later_bound():
    """The bound of hold ends at 1 + 7 = 8 s."""
    detect, hold = phase_bars(STEPS, impact(), [check("recovery.hold", 7)])

    assert (detect.width, detect.bound_s, detect.bound_left) == (12.5, None, None)
    assert (hold.left, hold.bound_left) == (12.5, 100)


def test_recovery_bars_clip_phases_before_the_observed_firing():
    """The NAK came 1 s before the fault was observed, the resent packet 1 s after: no bar starts left of the scale."""
    noticed = Phase(name="detect", start_ns=T0 - S, end_ns=T0 - S, detail="", is_from_firing=True)
    detect, again, hold = phase_bars((noticed, phase("retransmit", -1, 1), phase("hold", 1, 4)), impact(), [])

    assert (detect.left, detect.width) == (0, 0)
    assert (again.left, again.width) == (0, 25)
    assert (hold.left, hold.width) == (25, 75)


def test_recovery_bars_far_bound_is_listed_and_not_drawn():
    detect, _ = phase_bars(STEPS, impact(), [check("recovery.detect", 100)])

    assert (detect.width, detect.bound_s, detect.bound_left, detect.broken) == (25, 100, None, False)


def test_recovery_bars_show_an_absent_phase_only_with_a_bound():
    assert [one.phase.name for one in phase_bars(STEPS, impact(), [])] == ["detect", "hold"]
    shown = phase_bars(STEPS, impact(), [check("recovery.qp_error", 1)])
    assert [one.phase.name for one in shown] == ["detect", "qp_error", "hold"]


def test_recovery_bars_ignore_lower_bounds():
    assert phase_bars(STEPS, impact(), [check("recovery.detect", 2, comparison="min")])[0].bound_s is None


def test_recovery_bars_need_two_phases_or_a_bound():
    assert phase_bars([phase("hold", 0, 4)], impact(), []) == ()
    assert len(phase_bars([phase("hold", 0, 4)], impact(), [check("recovery.hold", 5)])) == 1


@pytest.mark.parametrize(("bound", "shown"), [(60, "of 60 s"), (0.001, "broken")])
def test_report_shows_the_bound_of_a_phase(tmp_path, bound, shown):
    directory = finished(tmp_path, synthetic_run())
    verdict = directory.read_verdict()
    more = (*verdict.checks, check("recovery.hold", bound))
    directory.write_verdict(msgspec.structs.replace(verdict, checks=more))

    page = report.render(directory.path).read_text(encoding="utf-8")

    assert 'class="phases bounded"' in page
    assert shown in page[page.index('class="phases bounded"') :]
