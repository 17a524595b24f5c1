"""Parse and format durations, sizes and rates for people.

    "8s" "500ms" "2m" "250us"  ->  nanoseconds        "64KiB" "16MiB" "4096"  ->  bytes

Powers of 1024 carry the `i` (KiB, MiB, GiB); powers of 1000 do not (kB, MB, GB). A bare number is refused for
a duration, because it does not show whether seconds or milliseconds are meant.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

__all__ = ["format_bytes", "format_duration", "format_rate", "parse_duration_ns", "parse_size_bytes"]

_NUMBER_AND_UNIT = re.compile(r"\s*(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[A-Za-z]*)\s*")
_DURATION_UNITS_NS = {
    "ns": 1,
    "us": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
    "d": 86_400_000_000_000,
}
_SIZE_UNITS_BYTES = {
    "": 1,
    "B": 1,
    "kB": 1_000,
    "MB": 1_000_000,
    "GB": 1_000_000_000,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
}


def _parse(text: str, units: dict[str, int], quantity: str, example: str) -> int:
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None or match["unit"] not in units:
        known = ", ".join(unit for unit in units if unit)
        raise ValueError(f'"{text}" is not a {quantity}; write a number and one of {known}, such as "{example}"')
    try:
        value = Decimal(match["number"]) * units[match["unit"]]
    except InvalidOperation as error:  # pragma: no cover - the pattern admits decimals only
        raise ValueError(f'"{text}" is not a {quantity}') from error
    if value != value.to_integral_value():
        raise ValueError(f'"{text}" is not a whole number of the smallest unit')
    return int(value)


def parse_duration_ns(text: str) -> int:
    """Parse a duration such as "8s", "500ms", "2m", "1.5s" or "7d" to ns.

    Raises:
        ValueError: not a number with a unit of time.
    """
    return _parse(text, _DURATION_UNITS_NS, "duration", "8s")


def parse_size_bytes(text: str) -> int:
    """Parse a size such as "64KiB", "16MiB", "1GB" or "4096" to bytes.

    Raises:
        ValueError: not a number with a unit of size, or not a whole number of bytes.
    """
    return _parse(text, _SIZE_UNITS_BYTES, "size", "16MiB")


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
