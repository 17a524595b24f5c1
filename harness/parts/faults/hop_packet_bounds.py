"""How many packets passed the hop of a fault while it acted, from samples of its port. Pure.

Samples are a tenth of a second or more apart, so only two bounds are known. The lower bound counts from the first
sample after the first hit to the last sample before the last hit. The upper bound counts from the last sample before
arming to the first sample after the removal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from faultbed.inject.evidence.receipt import Receipt
from faultbed.testbed.observe.counters import delta
from faultbed.testbed.observe.telemetry import Sample

__all__ = ["passed"]

_SLACK_NS = 200_000_000
"""Margin before arming and after the removal, because both times are those of the readback."""
_DROPS = frozenset({"packet.drop"})


def passed(samples: Iterable[Sample], receipt: Receipt, *, node: str) -> tuple[int, int] | None:
    """Return the least and the most packets, of all kinds, that passed; None if the samples do not show it.

    Args:
        samples: samples of the run's counters, in order of time.
        receipt: the receipt of a fault at one hop. Its readback names device and hook.
        node: the switch that has the device.
    """
    hook: Mapping[str, Any] = receipt.armed.readback or {}
    armed_ns, cleared_ns = receipt.armed.at_ns, receipt.cleared.at_ns
    first_ns, last_ns = receipt.fired.first_ns, receipt.fired.last_ns
    if hook.get("hook") not in {"egress", "ingress"} or not isinstance(armed_ns, int):
        return None
    if not isinstance(cleared_ns, int) or first_ns is None or last_ns is None:
        return None
    # A device counts packets before an ingress rule and after an egress rule: the latter's drops are not counted.
    egress = hook["hook"] == "egress"
    uncounted = receipt.fired.count if egress and receipt.kind in _DROPS else 0
    name = f"{hook.get('device')}.{'tx' if egress else 'rx'}_packets"
    readings = [
        (sample.at_ns, sample.values[name]) for sample in samples if sample.node == node and name in sample.values
    ]
    before = [value for at_ns, value in readings if at_ns <= armed_ns - _SLACK_NS]
    after = [value for at_ns, value in readings if at_ns >= cleared_ns + _SLACK_NS]
    inside = [value for at_ns, value in readings if first_ns <= at_ns <= last_ns]
    if not before:
        return None
    least = delta(inside[0], inside[-1]) if inside else 0
    # Samples hold only counters that changed. Without a sample after the end, the last value is still current.
    most = delta(before[-1], after[0] if after else readings[-1][1])
    return least, most + uncounted
