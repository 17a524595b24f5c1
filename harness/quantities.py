"""Format durations, sizes and rates for people; `faultbed.testbed.units` parses what people write."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["format_bytes", "format_duration", "format_rate"]


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str | None:
    """Return a value with three significant figures or so, in the largest unit that it reaches; None: there is none."""
    for scale, unit in units:
        if abs(value) >= scale:
            size = value / scale
            return f"{_trim(size, 0 if abs(size) >= 100 else 1 if abs(size) >= 10 else 2)} {unit}"  # noqa: PLR2004
    return None


def _trim(value: float, digits: int) -> str:
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_duration(ns: float) -> str:
    """Format a duration for people with about three significant figures (`1.3 s`, `77 ms`, `2 min`)."""
    if abs(ns) >= 120e9:  # noqa: PLR2004 - two minutes; below it seconds read better
        return f"{_trim(ns / 60e9, 1)} min"
    short = "0 s" if ns == 0 else f"{_trim(ns, 0)} ns"
    return _scaled(ns, ((1e9, "s"), (1e6, "ms"), (1e3, "µs"))) or short


def format_bytes(size: float) -> str:
    """Format a number of bytes for people, in powers of 1024 (`1.5 MiB`)."""
    for scale, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(size) >= scale:
            return f"{_trim(size / scale, 2)} {unit}"
    return f"{_trim(size, 0)} B"


def format_rate(bytes_per_s: float) -> str:
    """Format a rate for people, in bits per second (`1.2 Gb/s`, `84 Mb/s`)."""
    bits = bytes_per_s * 8
    return _scaled(bits, ((1e9, "Gb/s"), (1e6, "Mb/s"), (1e3, "kb/s"))) or f"{_trim(bits, 0)} b/s"
