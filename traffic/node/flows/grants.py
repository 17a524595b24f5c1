"""Grants to send to an RNIC, given out in turn. Pure."""

from __future__ import annotations

from collections import deque

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from typing import Any

__all__ = ["Grants"]


class Grants:
    """Grants to send to an RNIC: at most `admit` are out at a time, and the waiting senders take turns."""

    def __init__(self, admit: int) -> None:
        self.free = admit
        self.waiting: deque[Any] = deque()
        self.held: dict[Any, int] = {}

    def join(self, who: Any) -> list[Any]:
        """Add a sender, or restart one whose grants were lost. Return the senders that get a grant now."""
        granted = self.leave(who)
        self.held[who] = 0
        self.waiting.append(who)
        return granted + self._serve()

    def came(self, who: Any) -> list[Any]:
        """Record that a granted chain of `who` has arrived. Return the senders that get a grant now."""
        if self.held.get(who):
            self.held[who] -= 1
            self.free += 1
            self.waiting.append(who)
        return self._serve()

    def leave(self, who: Any) -> list[Any]:
        """Remove a sender that has no more data or cannot send. Return the senders that get a grant now."""
        self.free += self.held.pop(who, 0)
        self.waiting = deque(one for one in self.waiting if one != who)
        return self._serve()

    def _serve(self) -> list[Any]:
        granted = []
        while self.free and self.waiting:
            who = self.waiting.popleft()
            self.free -= 1
            self.held[who] += 1
            granted.append(who)
        return granted
