"""A run and its passes, for tests of the parts that take part in one. What a test does not name is not there."""

from __future__ import annotations

from faultbed.harness.parts.passes import Pass, Setting

_ABSENT = {
    "experiment": None,
    "plan": None,
    "faults": (),
    "ranks": (),
    "lab": None,
    "journal": None,
    "run_dir": None,
    "progress": lambda _line: None,
}


def setting_of(**fields):
    """Return what the passes of a run have in common."""
    return Setting(**{**_ABSENT, "errors": [], **fields})


def pass_of(phase="measured", *, setting=None, **fields):
    """Return a pass that has not begun, without parts. `fields` are those of its setting."""
    return Pass(phase=phase, setting=setting or setting_of(**fields))
