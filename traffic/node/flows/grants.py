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

    def join(self, sender: Any) -> list[Any]:
        """Add a sender, or restart one whose grants were lost. Return the senders that get a grant now."""
        granted = self.leave(sender)
        self.held[sender] = 0
        self.waiting.append(sender)
        return granted + self._serve()

    def arrived(self, sender: Any) -> list[Any]:
        """Record that a granted chain of `sender` has arrived. Return the senders that get a grant now."""
        if self.held.get(sender):
            self.held[sender] -= 1
            self.free += 1
            self.waiting.append(sender)
        return self._serve()

    def leave(self, sender: Any) -> list[Any]:
        """Remove a sender that has no more data or cannot send. Return the senders that get a grant now."""
        self.free += self.held.pop(sender, 0)
        self.waiting = deque(waiting for waiting in self.waiting if waiting != sender)
        return self._serve()

    def _serve(self) -> list[Any]:
        granted = []
        while self.free and self.waiting:
            sender = self.waiting.popleft()
            self.free -= 1
            self.held[sender] += 1
            granted.append(sender)
        return granted
