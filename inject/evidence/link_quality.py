"""Whether a link has as few errors after a fault as before it: bits that FEC corrects, and errors beyond FEC.

A link that is up again may still be worse than before: with a receiver that has trained badly, FEC corrects more bits
and has less margin. The counters are those of the RNIC's port (`faultbed.testbed.node.phy_counters`), which only grow.
They are compared as rates over two windows of equal length, one before the fault and one after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from faultbed.testbed.node.phy_counters import BEYOND_FEC, CORRECTED
from faultbed.testbed.observe.counters import Snapshot, value_at

__all__ = ["WINDOW_S", "Rates", "keys", "rates", "unknown", "worse"]

WINDOW_S = 2.0
"""Length of a window. At 400 Gb/s, a bit error rate of 1e-9 is then 800 bits."""
_TIMES = 10.0
"""A rate that grew by less is as before: rates of healthy links differ by a few times from minute to minute."""
_FLOOR_BITS_PER_S = 1000.0
"""A rate of corrected bits that is always good: at 100 Gb/s a bit error rate of 1e-8 (preflight accepts 1e-5)."""

Rates = Mapping[str, float]
"""Increments per second, by `node/netdev.counter`. A counter that was not read twice, or was reset, is missing."""


def keys(ports: Iterable[str]) -> tuple[str, ...]:
    """Return the counters of these ports (`node/netdev`)."""
    return tuple(f"{port}.{name}" for port in ports for name in (CORRECTED, BEYOND_FEC))


def rates(ports: Sequence[str], first: Snapshot, last: Snapshot, took_s: float) -> Rates:
    """Return the rates of the ports' counters between two readings that are `took_s` apart."""
    read = {key: (value_at(first, key), value_at(last, key)) for key in keys(ports)}
    return {
        key: (later - earlier) / took_s
        for key, (earlier, later) in read.items()
        if earlier is not None and later is not None and later >= earlier and took_s > 0
    }


def unknown(ports: Sequence[str], found: Rates) -> tuple[str, ...]:
    """Return the counters of which no rate is known."""
    return tuple(key for key in keys(ports) if key not in found)


def worse(ports: Sequence[str], before: Rates, after: Rates) -> tuple[str, ...]:
    """Return a sentence for each counter whose rate is worse than before, or not known; empty: the links are as before.

    Errors beyond FEC must not occur at all, unless they occurred before.
    """
    sentences = []
    for key in keys(ports):
        was, now = before.get(key), after.get(key)
        if was is None or now is None:
            sentences.append(f"the rate of {key} {'before' if was is None else 'after'} the fault is not known")
        elif now > _TIMES * was + (_FLOOR_BITS_PER_S if key.endswith(CORRECTED) else 0.0):
            sentences.append(f"{key} grows by {now:.3g} a second, before the fault by {was:.3g}")
    return tuple(sentences)
