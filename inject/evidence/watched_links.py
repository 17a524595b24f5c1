"""Watch links for packets of queue pairs: which addresses they come from and go to, in two seconds."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from faultbed.testbed.errors import LabError, UsageError
from faultbed.testbed.observe import packet_capture
from faultbed.testbed.packets import columns

if TYPE_CHECKING:
    from faultbed.testbed.lab import Lab
    from faultbed.testbed.model.topology import Link

__all__ = ["WATCH_S", "addresses_on"]

WATCH_S = 2.0
"""How long links are watched for RoCEv2 packets: a collective with compute phases pauses for a second."""


def addresses_on(lab: Lab, links: Mapping[str, Link]) -> tuple[dict[str, frozenset[str]], str]:
    """Return the addresses in the RoCEv2 packets that are seen on each link now, by the link's name.

    A link is missing if it is not known what crosses it: its switch forwards in an ASIC, or the capture lost packets
    and has none of it. The text is the reason if nothing could be watched; otherwise it is empty.
    """
    if not links:
        return {}, ""
    try:
        names = {packet_capture.port_named(lab.topology, name)[0]: name for name in links}
        with packet_capture.start(lab, list(names)) as capturing:
            threading.Event().wait(WATCH_S)
            captured = capturing.stop()
        seen = _addresses_by_port(columns.decode(captured.frames), captured.frames.interfaces)
    except (LabError, UsageError) as error:
        return {}, f", and packets could not be watched: {error}"
    # Without a packet, a capture that lost some shows nothing.
    lossy = {proof.name for proof in captured.proofs if not proof.is_whole}
    known = [port for port in names if port in seen or port not in lossy]
    return {names[port]: frozenset(seen.get(port, ())) for port in known}, ""


def _addresses_by_port(packets: columns.Packets, ports: tuple[str, ...]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for port, src, dst in {*zip(packets.port, packets.src, packets.dst, strict=True)}:
        found.setdefault(ports[int(port)], set()).update((packets.addresses[int(src)], packets.addresses[int(dst)]))
    return found
