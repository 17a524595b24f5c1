"""One clock for all times: node times are converted to the controller's CLOCK_MONOTONIC.

Every node program answers `{"do": "clock"}` with `{"event": "clock", "monotonic_ns": N}`. Of several exchanges the one
with the shortest round trip bounds the offset best (Cristian 1989; the same rule as NTP's clock filter, RFC 5905 §10).

Two clocks drift apart by tens of microseconds a second. A program that uses an offset for longer measures it again at
the end and uses the `widened` one, whose error covers both measurements and every offset in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from faultbed.testbed.errors import LabError
from faultbed.testbed.remote.remote_node import Channel

__all__ = ["ClockOffset", "Exchange", "drifted_ns", "estimate", "measure", "measure_by", "renewed", "widened"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One exchange: controller time before and after, node time in between, all in ns."""

    sent_ns: int
    node_ns: int
    received_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """`controller_ns = node_ns + offset_ns`, wrong by at most `error_ns`."""

    offset_ns: int
    error_ns: int

    def to_controller(self, node_ns: int) -> int:
        """Convert a node's time to the controller's."""
        return node_ns + self.offset_ns


def estimate(exchanges: Sequence[Exchange]) -> ClockOffset:
    """Return the offset from the exchange with the shortest round trip; the error is half of that round trip."""
    best = min(exchanges, key=lambda exchange: exchange.received_ns - exchange.sent_ns)
    middle_ns = (best.sent_ns + best.received_ns) // 2
    return ClockOffset(offset_ns=middle_ns - best.node_ns, error_ns=(best.received_ns - best.sent_ns + 1) // 2)


def drifted_ns(before: ClockOffset, after: ClockOffset) -> int:
    """Return by how much two measurements of one clock contradict each other: it has moved by at least that."""
    return max(0, abs(before.offset_ns - after.offset_ns) - before.error_ns - after.error_ns)


def widened(first: ClockOffset, *later: ClockOffset) -> ClockOffset:
    """Return the first offset with an error that also covers the true offsets of all later measurements."""
    errors = [abs(offset.offset_ns - first.offset_ns) + offset.error_ns for offset in later]
    return ClockOffset(offset_ns=first.offset_ns, error_ns=max([first.error_ns, *errors]))


def renewed(before: ClockOffset, now: ClockOffset) -> ClockOffset:
    """Return the narrower measurement, or `now` if the clock has moved."""
    return now if now.error_ns < before.error_ns or drifted_ns(before, now) else before


def measure_by(read_ns: Callable[[], int], *, rounds: int = 5) -> ClockOffset:
    """Measure a clock offset in some exchanges; `read_ns` returns the node's time."""
    exchanges = []
    for _ in range(rounds):
        sent_ns = time.monotonic_ns()
        node_ns = read_ns()
        exchanges.append(Exchange(sent_ns=sent_ns, node_ns=node_ns, received_ns=time.monotonic_ns()))
    return estimate(exchanges)


def measure(channel: Channel, *, rounds: int = 5, timeout_s: float = 10.0) -> ClockOffset:
    """Measure the clock offset of a node program in some exchanges.

    Call it before the program sends events of its own: any other message is an error here.
    """

    def read_ns() -> int:
        channel.send({"do": "clock"})
        answer = channel.receive(timeout_s=timeout_s)
        if answer is None or answer.get("event") != "clock":
            raise LabError(f"clock of a node program: unexpected answer {answer!r}; run the command again")
        return int(answer["monotonic_ns"])

    return measure_by(read_ns, rounds=rounds)
