"""Split of an operation's time on one rank. The rank's engine has one thread, which is always in exactly one part.

    post         post work requests: segments and credits
    credit       idle, and a segment waits for the peer's credit (clear to send)
    wire         idle otherwise: data or acknowledgements are under way, or a peer is late
    copy         copy or reduce what arrived
    completion   all other work: wake up, poll, dispatch completions, decide what is next

The parts of an operation add up to its time, less the modelled pauses of its program. They are wall-clock times: if
another process takes the CPU, the part that it interrupts grows. On an engine with several ranks, `completion` includes
the work for the other ranks.
"""

from __future__ import annotations

import time

__all__ = ["COMPLETION", "COPY", "PARTS", "POST", "PartsClock"]

PARTS = ("post", "credit", "wire", "copy", "completion")
POST, CREDIT, WIRE, COPY, COMPLETION = range(len(PARTS))


class PartsClock:
    """Adds the time since the last change to the part that ends. A change costs one reading of the clock."""

    def __init__(self) -> None:
        self.needs_credit = False
        """Whether a segment could be posted if the peer had sent a credit. It decides the part of idle time."""
        self.begin(0)

    def begin(self, now_ns: int) -> None:
        """Start an operation."""
        self.parts_ns = [0] * len(PARTS)
        self._since_ns, self._part = now_ns, COMPLETION

    def enter(self, part: int) -> None:
        """Change to a part now."""
        now_ns = time.monotonic_ns()
        self.parts_ns[self._part] += now_ns - self._since_ns
        self._since_ns, self._part = now_ns, part

    def idle(self, from_ns: int, to_ns: int, *, is_pause: bool) -> None:
        """Note that the engine has slept. A pause of the program is in no part."""
        self.parts_ns[self._part] += from_ns - self._since_ns
        if not is_pause:
            self.parts_ns[CREDIT if self.needs_credit else WIRE] += to_ns - from_ns
        self._since_ns = to_ns

    def end(self, now_ns: int) -> list[int]:
        """End the operation. Return the ns of each of `PARTS`."""
        self.parts_ns[self._part] += now_ns - self._since_ns
        self._since_ns = now_ns
        return self.parts_ns
