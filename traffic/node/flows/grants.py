"""Whose turn it is to send to an RNIC. Pure."""

from __future__ import annotations

from collections import deque

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from typing import Any

__all__ = ["Grants"]


class Grants:
    """Who may send to an RNIC: at most `admit` grants are held at a time, and everybody has a turn."""

    def __init__(self, admit: int) -> None:
        self.free = admit
        self.waiting: deque[Any] = deque()
        self.held: dict[Any, int] = {}

    def join(self, who: Any) -> list[Any]:
        """Somebody wants to send, or wants it again after its grants were lost; who is granted now."""
        granted = self.leave(who)
        self.held[who] = 0
        self.waiting.append(who)
        return granted + self._serve()

    def came(self, who: Any) -> list[Any]:
        """What somebody was granted has come."""
        if self.held.get(who):
            self.held[who] -= 1
            self.free += 1
            self.waiting.append(who)
        return self._serve()

    def leave(self, who: Any) -> list[Any]:
        """Somebody has nothing more to send, or cannot."""
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
