"""Reject impossible values in the evidence of a run: numbers too large for a time or a count, invalid addresses. Pure.

A file that was edited, assembled or damaged is rejected before its readers compute with it. The error names the field.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

import msgspec

from faultbed.testbed.leaves import leaves
from faultbed.testbed.model.topology import Topology

__all__ = ["refuse_addresses", "refuse_large_numbers"]

_MOST = 10**18
"""Beyond any time of a machine (31 years in ns) and any number of bytes, and far from the ends of 64 bits."""
_MOST_COUNTER = 2**64 - 1
_COUNTERS = ("counters_before", "counters_after")
_LONG = re.compile(rb"[0-9]{19}|[0-9][eE]\+?[0-9]{2}")


def refuse_large_numbers(content: bytes) -> None:
    """Raise ValueError, with the path, for a number so large that sums or differences may not fit 64 bits.

    Only a kernel's counters may use all 64 bits.
    """
    if _LONG.search(content) is None:  # the usual case: a walk through all values takes much longer
        return
    for path, value in leaves(msgspec.json.decode(content)):
        if not isinstance(value, int | float):
            continue
        most = _MOST_COUNTER if path.startswith(_COUNTERS) else _MOST
        if not -most <= value <= most:
            raise ValueError(f"{path}: {value} is beyond any time or count of a run")


def refuse_addresses(topology: Topology) -> None:
    """Raise ValueError for an invalid address in the topology."""
    for text, path in _addresses(topology):
        try:
            ipaddress.ip_interface(text)
        except ValueError as error:
            raise ValueError(f"topology.{path}: {text!r} is no address") from error


def _addresses(topology: Topology) -> Iterator[tuple[str, str]]:
    for host_number, host in enumerate(topology.hosts):
        yield host.front_end_address, f"hosts[{host_number}].front_end_address"
        for number, rnic in enumerate(host.rnics):
            yield rnic.address, f"hosts[{host_number}].rnics[{number}].address"
    for number, switch in enumerate(topology.switches):
        yield switch.loopback, f"switches[{number}].loopback"
    for number, link in enumerate(topology.links):
        for end, port in (("a", link.a), ("b", link.b)):
            if port.address is not None:
                yield port.address, f"links[{number}].{end}.address"
