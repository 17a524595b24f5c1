"""Compute whether the buffers of a lab's QoS profile fit: headroom for a pause, and ECN before PFC. Modelled. Pure.

After a switch has sent a pause, packets still arrive: those on the wire, those sent before the pause reached the far
end and took effect there, and the packet that the far end had begun. Without headroom for all of them, packets of a
lossless priority are lost:

    2 x propagation x rate + reaction + 2 MTU        (IEEE 802.1Qbb, annex O; reaction: up to 60 quanta of 512 bits)

A port may fill the shared pool up to a dynamic threshold: with n busy ports, pool x 2^alpha / (1 + n 2^alpha)
(Choudhury and Hahne, 1998). If Kmax is above that threshold, the port pauses before DCQCN gets enough marks to slow
down.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory.audit_finding import InventoryFinding
from faultbed.testbed.inventory.lab_inventory import Inventory

__all__ = ["findings", "headroom_bytes", "pause_threshold_bytes"]

METRES_PER_S = 2e8
"""Speed of light in fibre."""
REACTION_BITS = 60 * 512
"""Maximum number of bits that a port sends after a pause has arrived (IEEE 802.1Qbb, 60 pause quanta)."""


def headroom_bytes(*, gbps: float, mtu: int, cable_m: float) -> float:
    """Return the headroom that a port needs, in bytes.

    Raises:
        UsageError: a value is not above 0, or the cable's length is negative.
    """
    if not (0 < gbps < math.inf and mtu > 0 and 0 <= cable_m < math.inf):
        raise UsageError(f"--cable: {gbps:g} Gb/s, MTU {mtu} and {cable_m:g} m are no port; correct the value")
    bytes_per_s = gbps * 1e9 / 8
    return 2 * cable_m / METRES_PER_S * bytes_per_s + REACTION_BITS / 8 + 2 * mtu


def pause_threshold_bytes(*, pool_bytes: float, alpha: int, busy_ports: int) -> float:
    """Return the length of a queue, in bytes, above which its port pauses, if `busy_ports` ports share the pool."""
    factor = 2.0**alpha
    return pool_bytes * factor / (1 + busy_ports * factor)


def findings(
    inventory: Inventory, *, cable_m: float, pool_bytes: float | None, busy_ports: int
) -> tuple[InventoryFinding, ...]:
    """Return the problems of the buffers in a lab's QoS profile.

    Raises:
        UsageError: the lab has no QoS profile, or a value is invalid.
    """
    if inventory.qos is None:
        raise UsageError(f"{inventory.path}: no QoS profile (faultbed_qos); only a rack lab has one")
    return tuple(_findings(inventory, cable_m=cable_m, pool_bytes=pool_bytes, busy_ports=busy_ports))


def _findings(
    inventory: Inventory, *, cable_m: float, pool_bytes: float | None, busy_ports: int
) -> Iterator[InventoryFinding]:
    qos = inventory.qos
    if qos is None or not qos.pfc_priorities or qos.buffer is None:
        return
    speeds = [end.speed_gbps for link in inventory.topology.links for end in (link.a, link.b) if end.speed_gbps]
    if speeds:
        needed = headroom_bytes(gbps=max(speeds), mtu=inventory.mtu, cable_m=cable_m)
        if qos.buffer.xoff_kib * 1024 < needed:
            yield InventoryFinding(
                place="all.qos.buffer.xoff_kib",
                what=f"{qos.buffer.xoff_kib} KiB of headroom, but {needed / 1024:.0f} KiB still arrive after a pause "
                f"({max(speeds):g} Gb/s, {cable_m:g} m of cable)",
                do=f"give {math.ceil(needed / 1024)} or more, or packets of a lossless priority are lost",
            )
    if pool_bytes is None or qos.ecn is None:
        return
    threshold = pause_threshold_bytes(pool_bytes=pool_bytes, alpha=qos.buffer.alpha, busy_ports=busy_ports)
    if qos.ecn.max_kib * 1024 > threshold:
        yield InventoryFinding(
            place="all.qos.ecn.max_kib",
            what=f"Kmax {qos.ecn.max_kib} KiB is above xoff: with {busy_ports} busy ports a port pauses at "
            f"{threshold / 1024:.0f} KiB",
            do=f"give less than {math.floor(threshold / 1024)}, or a larger alpha, so that marks come before pauses",
        )
