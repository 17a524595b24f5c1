"""Pauses in a rank's program that stand for work between collectives, without a GPU (modelled)."""

from __future__ import annotations

__all__ = ["Gate"]

OPEN = 1 << 62
"""A step beyond the end of every program."""


class Gate:
    """Holds back the sends of a phase and everything after it: `[phase, pause_ns, not_before_ns]`, in order of phases.

    Phase 0 is before the first fence, phase i is between fences i - 1 and i. The gate of a phase opens `pause_ns` after
    all earlier phases are done, and not before `not_before_ns` after the start of the iteration.
    """

    def __init__(self, pauses: list[list[int]], fences: list[int]) -> None:
        self.rows = [
            (phase, fences[phase - 1] if phase else -1, pause_ns, not_before_ns)
            for phase, pause_ns, not_before_ns in pauses
        ]
        self.begin(0)

    def begin(self, now_ns: int) -> None:
        """Start an iteration."""
        self.start_ns = self.reached_ns = now_ns
        self.index = 0
        self.until_ns: int | None = None
        self.paused_ns: list[int] = []
        self.step = self.rows[0][1] if self.rows else OPEN

    def advance(self, phases_done: int, now_ns: int) -> int | None:
        """Open every gate that may open. Return when to call again, or None if no gate waits for time alone."""
        while self.index < len(self.rows):
            phase, _, pause_ns, not_before_ns = self.rows[self.index]
            if phases_done < phase:
                return None
            if self.until_ns is None:
                self.reached_ns = now_ns
                self.until_ns = max(now_ns + pause_ns, self.start_ns + not_before_ns)
            if now_ns < self.until_ns:
                return self.until_ns
            self.paused_ns.append(now_ns - self.reached_ns)
            self.until_ns = None
            self.index += 1
            self.step = self.rows[self.index][1] if self.index < len(self.rows) else OPEN
        return None
