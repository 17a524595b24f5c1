"""How long packets wait for a slow link of a soft lab, against the ACK timeout of the queue pairs that sent them. Pure.

A sender that gets no ACK within its timeout retransmits packets that are only queued. After `retry_cnt` retries the
queue pair fails, although no packet was lost. All flows to an RNIC share the link to it, so that link is checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from faultbed.harness.quantities import format_bytes, format_duration, format_rate
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.packets.bth import timeout_ns
from faultbed.traffic.flows.flow_spec import FlowSpec, shape

__all__ = ["RXE_PACKETS", "QueueWait", "describe_wait", "longest_wait"]

RXE_PACKETS = 64
"""Maximum number of packets in flight of an rxe queue pair (rxe_param.h, RXE_INFLIGHT_SKBS_PER_QP_HIGH)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueWait:
    """Queue for the link to an RNIC: the bytes that may be queued, and how long the last of them waits.

    `timeout` is the smallest exponent of the flows' ACK timeouts. `sufficient_timeout` is the smallest exponent whose
    timeout exceeds the wait.
    """

    rnic: str
    rate_bps: int
    queued_bytes: int
    wait_ns: int
    timeout: int
    sufficient_timeout: int


def longest_wait(inventory: Inventory, specs: Iterable[FlowSpec]) -> QueueWait | None:
    """Return the longest wait for an RNIC that exceeds an ACK timeout; None if no wait does."""
    queued: dict[str, int] = {}
    timeouts: dict[str, int] = {}
    for spec in specs:
        if spec.transport != "rc":  # UC and UD have no ACK timeout
            continue
        rnic = spec.src if spec.verb == "read" else spec.dst
        depth, _ = shape(spec)
        flow_bytes = min(depth * spec.message_bytes, RXE_PACKETS * spec.qp.mtu)
        queued[rnic] = queued.get(rnic, 0) + spec.qps * flow_bytes
        timeouts[rnic] = min(timeouts.get(rnic, spec.qp.timeout), spec.qp.timeout)
    waits = [
        _wait(rnic, rate_bps, queued[rnic], timeouts[rnic])
        for rnic in queued
        if (rate_bps := _rate_bps(inventory, rnic)) is not None
    ]
    return max(
        (wait for wait in waits if wait.sufficient_timeout > wait.timeout), key=lambda wait: wait.wait_ns, default=None
    )


def describe_wait(wait: QueueWait) -> str:
    """Return a sentence with the wait, the timeout, and what to do."""
    timeout = format_duration(timeout_ns(wait.timeout))
    return (
        f"up to {format_bytes(wait.queued_bytes)} wait for the {format_rate(wait.rate_bps / 8)} of {wait.rnic}, the "
        f"last byte for {format_duration(wait.wait_ns)}: longer than the ACK timeout of {timeout}, so senders "
        f"retransmit packets that are only queued; use --qp timeout={wait.sufficient_timeout} or a smaller --depth"
    )


def _wait(rnic: str, rate_bps: int, queued_bytes: int, timeout: int) -> QueueWait:
    wait_ns = round(queued_bytes * 8e9 / rate_bps)
    sufficient_timeout = next(step for step in range(1, 32) if step == 31 or timeout_ns(step) > wait_ns)  # noqa: PLR2004 - 5 bits
    return QueueWait(
        rnic=rnic,
        rate_bps=rate_bps,
        queued_bytes=queued_bytes,
        wait_ns=wait_ns,
        timeout=timeout,
        sufficient_timeout=sufficient_timeout,
    )


def _rate_bps(inventory: Inventory, rnic: str) -> int | None:
    """Return the rate of the switch port to an RNIC; None if the port is not shaped."""
    host, _, name = rnic.partition(":")
    link = inventory.topology.rnic_link(host, name)
    port = link.other(host)
    shape_of_port = inventory.shapes.get(port.node, {}).get(port.netdev)
    return None if shape_of_port is None else shape_of_port.rate_bps
