"""Windows of the fabric's states, for tests."""

from __future__ import annotations

from synthetic_run import T0, S

from faultbed.harness.report.fabric.fabric_states import Window


def window(number=1, target="rtsw1:ctsw1", start_s=10, end_s=13, kind="link.down"):
    return Window(number=number, kind=kind, target=target, start_ns=T0 + start_s * S, end_ns=T0 + end_s * S)
