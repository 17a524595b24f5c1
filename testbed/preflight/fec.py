"""Errors that FEC corrects, and errors that it cannot correct, from two readings of ethtool's counters. Pure.

    ethtool -I --show-fec DEV    what is configured and active, and blocks since the driver came up (ethtool(8))
    ethtool -S DEV               the driver's own names (mlx5: Documentation/networking/.../mlx5/counters.rst)

Only growth matters: a port counts errors while its link trains, and keeps them. Not yet run on hardware.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.preflight.collect import Facts
from faultbed.testbed.preflight.rack_formats import RAW_BER_MAX

__all__ = ["FecReading", "fec_wrong", "problems", "read", "undetermined"]

_COUNTER = re.compile(r"^[ \t]+(\w+):[ \t]+(\d+)[ \t\r]*$", re.MULTILINE)
_ACTIVE = re.compile(r"^Active FEC encodings?:[ \t]*(.*?)[ \t\r]*$", re.MULTILINE)
_LABEL = re.compile(r"^(at|speed):[ \t]*([0-9.]+)[ \t\r]*$", re.MULTILINE)
_BEYOND = ("uncorrectable_blocks", "rx_pcs_symbol_err_phy", "rx_symbol_err_phy", "rx_crc_errors_phy")
"""Errors that FEC did not correct, or that occurred without FEC."""
_CORRECTED = ("rx_corrected_bits_phy", "corrected_bits")
_NO_FEC = frozenset({"", "Off", "None", "Not reported"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FecReading:
    """One reading: the host's clock in s, the speed in Mb/s, the active FEC (None: unknown), and the counters."""

    at_s: float | None
    speed_mbps: int | None
    active: str | None
    counters: Mapping[str, int]


def read(text: str) -> FecReading:
    """Parse the output of `faultbed.testbed.preflight.collect` for one port.

    What ethtool did not print is None, and missing among the counters.
    """
    labels = {match[1]: match[2] for match in _LABEL.finditer(text)}
    active = _ACTIVE.search(text)
    counters = {match[1]: int(match[2]) for match in _COUNTER.finditer(text) if match[1] in (*_BEYOND, *_CORRECTED)}
    return FecReading(
        at_s=_float(labels.get("at", "")),
        speed_mbps=int(labels["speed"]) if labels.get("speed", "").isdigit() else None,
        active=active[1] if active else None,
        counters=counters,
    )


def fec_wrong(first: FecReading, last: FecReading) -> list[tuple[str, str]]:
    """Return (observed, expected) of each problem: FEC is off, uncorrected errors grow, or too many are corrected."""
    wrong = []
    if last.active in _NO_FEC:
        wrong.append(("no FEC is active", "RS, on both ends"))
    for name in _BEYOND:
        grown = last.counters.get(name, 0) - first.counters.get(name, 0)
        if name in first.counters and grown > 0:
            wrong.append((f"{name} grew by {grown} between two readings", "no growth: FEC corrects all errors"))
    ber = _ber(first, last)
    if ber is not None and ber > RAW_BER_MAX:
        wrong.append((f"BER before FEC {ber:.1e}", f"at most {RAW_BER_MAX:g}"))
    return wrong


def problems(inventory: Inventory, state: Mapping[str, Facts]) -> Iterator[tuple[str, str, str]]:
    """Yield (where, observed, expected) for each problem with the FEC of an RNIC's port."""
    for where, first, last in _readings(inventory, state):
        for observed, expected in fec_wrong(read(first), read(last)):
            yield where, observed, expected


def undetermined(inventory: Inventory, state: Mapping[str, Facts]) -> Iterator[tuple[str, str]]:
    """Yield (where, why) for ports that lack a counter, or whose counters were reset between the two readings."""
    for where, first, last in _readings(inventory, state):
        earlier, later = read(first), read(last)
        lacking = []
        if later.active is None:
            lacking.append("which FEC is active")
        both = set(_BEYOND) & set(earlier.counters) & set(later.counters)
        if not both or any(later.counters[name] < earlier.counters[name] for name in both):
            lacking.append("errors beyond FEC" + (", whose counters were reset meanwhile" if both else ""))
        if _ber(earlier, later) is None:
            lacking.append("bits that FEC corrected")
        if lacking:
            output = [line.strip() for line in last.splitlines() if line.strip() and not _LABEL.match(line)]
            words = (
                f" ({output[0]})" if output and later.active is None else "" if output else " (ethtool prints nothing)"
            )
            yield where, f"ethtool does not report {', '.join(lacking)}{words}"


def _ber(first: FecReading, last: FecReading) -> float | None:
    """Return the corrected bits per bit received between two readings; None if it is unknown."""
    if first.at_s is None or last.at_s is None or not last.speed_mbps:
        return None
    for name in _CORRECTED:
        grown = last.counters.get(name, -1) - first.counters.get(name, 0)
        if name in first.counters and grown >= 0 and last.at_s > first.at_s:
            return grown / (last.speed_mbps * 1e6 * (last.at_s - first.at_s))
    return None


def _readings(inventory: Inventory, state: Mapping[str, Facts]) -> Iterator[tuple[str, str, str]]:
    for host in inventory.topology.hosts:
        raw = state[host.name].raw
        for rnic in host.rnics:
            first, last = (raw.get(f"fec-{moment} {rnic.name}", "") for moment in ("first", "last"))
            yield f"{host.name}:{rnic.name}", first, last


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
