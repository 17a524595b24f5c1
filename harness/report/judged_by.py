"""A note about the version of faultbed that judged a run, for pages that another version renders.

The verdict and its checks were computed when the run took place. The values that the page computes from the
measurements are from the rendering version.
"""

from __future__ import annotations

from faultbed.harness.record.evidence.environment import Environment

__all__ = ["judged_by"]


def judged_by(then: Environment, now: Environment) -> str | None:
    """Return a note for the reader; None if the same code judged the run and renders its page.

    A run that did not record its code was judged by an older version, because this one records it.
    """
    if then.code is not None and (then.faultbed, then.code) == (now.faultbed, now.code):
        return None
    return (
        f"Judged by {_version_text(then)} when it ran; impacts, phases, metrics and attribution shown here are "
        f"computed by {_version_text(now)}, and may differ."
    )


def _version_text(environment: Environment) -> str:
    version = "" if environment.faultbed == "unknown" else f" {environment.faultbed}"
    commit = f"commit {environment.git}" if environment.git else ""
    if environment.code is not None:
        return f"faultbed{version} (code {environment.code[:8]}{', ' if commit else ''}{commit})"
    if version or commit:
        return f"faultbed{version} ({commit or 'code unknown'})"
    return "an unknown version of faultbed"
