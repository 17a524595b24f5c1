"""Who judged a run, told where the page of it is drawn by another faultbed.

The verdict and its checks are of the day of the run; what the page computes from the measurements is of the day on
which it is drawn.
"""

from __future__ import annotations

from harness.record.measurements import Environment

__all__ = ["judged_by"]


def judged_by(then: Environment, now: Environment) -> str | None:
    """A note for the reader; None: the same code judged the run and draws its page.

    A run that did not record its code is of an older faultbed, because this one does.
    """
    if then.code is not None and (then.faultbed, then.code) == (now.faultbed, now.code):
        return None
    return (
        f"Judged by {_who(then)} when it ran; impacts, phases, metrics and attribution shown here are computed by "
        f"{_who(now)}, and may differ."
    )


def _who(one: Environment) -> str:
    version = "" if one.faultbed == "unknown" else f" {one.faultbed}"
    commit = f"commit {one.git}" if one.git else ""
    if one.code is not None:
        return f"faultbed{version} (code {one.code[:8]}{', ' if commit else ''}{commit})"
    if version or commit:
        return f"faultbed{version}{f' ({commit})' if commit else ''}, which did not say of which code,"
    return "a version of faultbed that did not say which,"
