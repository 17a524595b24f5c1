"""The grammar of quantities that people write: a number and a unit, in files, on command lines and in fault parameters.

    "8s" "500ms" "2m" "250us"      a time          "64KiB" "16MiB" "1GB" "4096B"   a size
    "400Gb/s" "20Mb/s"             a rate          "20%" "0.2"                     a share

Powers of 1024 carry the `i` (KiB, MiB, GiB); powers of 1000 do not (kB, MB, GB). Rates count bits. `bit/s` means the
same as `b/s`, and `bytes` the same as `B`. A time, a size or a rate needs its unit, because a number does not show
which one is meant. A share has none, so that a bare number is one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from types import MappingProxyType

__all__ = [
    "QUANTITIES",
    "RATE",
    "SHARE",
    "SIZE",
    "TIME",
    "Quantity",
    "parse_duration_ns",
    "parse_rate_bps",
    "parse_share",
    "parse_size_bytes",
]

_NUMBER_AND_UNIT = re.compile(r"\s*(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[^\s0-9.+-]*)\s*")

_LARGEST = 2**63
"""Of any smallest unit: 292 years, or 9 million TB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A kind of quantity: what it is called, an example, zero, and its units with their sizes in the smallest one.

    `aliases` are further spellings of units, which messages do not list. `usual` is the unit that messages propose for
    a number without one.
    """

    name: str
    example: str
    zero: str
    units: Mapping[str, int]
    usual: str
    aliases: Mapping[str, str] = field(default_factory=dict)

    def size_of(self, unit: str) -> int | None:
        """Return the size of a unit in the smallest unit of this quantity; None: it is no unit of it."""
        return self.units.get(self.aliases.get(unit, unit))

    def parse(self, text: str) -> Decimal:
        """Return a quantity in the smallest unit.

        Raises:
            ValueError: the text is no number with a unit of this quantity.
        """
        match = _NUMBER_AND_UNIT.fullmatch(text)
        if match is not None and not match["unit"]:
            raise ValueError(self.without_unit(text.strip()))
        size = None if match is None else self.size_of(match["unit"])
        if match is None or size is None:
            remedy = f'write a number and one of {", ".join(self.units)}, such as "{self.example}"'
            raise ValueError(f'"{text}" is not a {self.name}; {remedy}')
        value = Decimal(match["number"]) * size
        if value >= _LARGEST:
            raise ValueError(f'"{text}" is too large for a {self.name}; write less')
        return value

    def without_unit(self, number: object, unit: str = "") -> str:
        """Return the sentence about a number without a unit, which proposes one: by default the usual one."""
        others = [other for other in self.units if other != (unit or self.usual)]
        more = f", or another of {', '.join(others)}" if others else ""
        return f'{number} has no unit; write "{number}{unit or self.usual}"{more}'

    def parse_whole(self, text: str) -> int:
        """Return a quantity as a whole number of the smallest unit.

        Raises:
            ValueError: the text is no such quantity, or has a fraction of the smallest unit.
        """
        value = self.parse(text)
        if value != value.to_integral_value():
            raise ValueError(f'"{text}" is not a whole number of {next(iter(self.units))}; write more of it')
        return int(value)

    def format(self, value: float) -> str:
        """Return the shortest spelling of an amount of the smallest unit, which `parse` reads back: `64KiB`."""
        if not value:
            return self.zero
        exact = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
        spellings = [f"{_plain(exact / size)}{unit}" for unit, size in self.units.items()]
        exact_ones = [text for text in spellings if self.parse(text) == exact]
        return min(reversed(exact_ones), key=lambda text: ("." in text, len(text)))


def _plain(number: Decimal) -> str:
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


TIME = Quantity(
    name="duration",
    example="8s",
    usual="s",
    zero="0s",
    units=MappingProxyType(
        {
            "ns": 1,
            "us": 10**3,
            "ms": 10**6,
            "s": 10**9,
            "m": 60 * 10**9,
            "h": 3600 * 10**9,
            "d": 86_400 * 10**9,
        }
    ),
    aliases=MappingProxyType({"µs": "us"}),
)
SIZE = Quantity(
    name="size",
    example="16MiB",
    usual="B",
    zero="0B",
    units=MappingProxyType(
        {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    ),
    aliases=MappingProxyType({"bytes": "B"}),
)
RATE = Quantity(
    name="rate",
    example="400Gb/s",
    usual="Mb/s",
    zero="0b/s",
    units=MappingProxyType({"b/s": 1, "kb/s": 10**3, "Mb/s": 10**6, "Gb/s": 10**9, "Tb/s": 10**12}),
    aliases=MappingProxyType({"bit/s": "b/s", "kbit/s": "kb/s", "Mbit/s": "Mb/s", "Gbit/s": "Gb/s", "Tbit/s": "Tb/s"}),
)
SHARE = Quantity(name="share", example="20%", zero="0%", usual="%", units=MappingProxyType({"%": 1}))
"""In percent; `parse_share` reads a bare number, too."""
QUANTITIES = (TIME, SIZE, RATE, SHARE)


def parse_duration_ns(text: str) -> int:
    """Parse a duration such as "8s", "500ms", "2m", "1.5s" or "7d" to ns.

    Raises:
        ValueError: not a number with a unit of time.
    """
    return TIME.parse_whole(text)


def parse_size_bytes(text: str) -> int:
    """Parse a size such as "64KiB", "16MiB", "1GB" or "4096B" to bytes.

    Raises:
        ValueError: not a number with a unit of size, or not a whole number of bytes.
    """
    return SIZE.parse_whole(text)


def parse_rate_bps(text: str) -> float:
    """Parse a rate such as "400Gb/s" or "20Mb/s" to bits per second.

    Raises:
        ValueError: not a number with a unit of rate.
    """
    return float(RATE.parse(text))


def parse_share(text: str) -> float:
    """Parse a share such as "20%" or "0.2" to a number; 1 is all of it.

    Raises:
        ValueError: neither a percentage nor a number.
    """
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is not None and not match["unit"]:
        if not math.isfinite(number := float(match["number"])):
            raise ValueError(f'"{text}" is too large for a share; write less')
        return number
    return float(SHARE.parse(text) / 100)
