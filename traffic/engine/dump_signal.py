"""Somebody asks for the flight recorders of what runs, by a signal to this process.

A signal's handler may come between any two instructions, also while a lock is held: it notes the wish and does nothing
else. Whichever run looks next takes the wish, on its own thread, and answers it (`traffic.engine.running_traffic`).
There is one wish of a process, as there is one handler of a signal.
"""

from __future__ import annotations

from types import FrameType

__all__ = ["note", "take"]


class _Wish:
    """Whether there is one that nobody has taken."""

    open = False


_WISH = _Wish()


def note(_number: int = 0, _frame: FrameType | None = None) -> None:
    """Somebody asks. Made to be the handler of a signal."""
    _WISH.open = True


def take() -> bool:
    """Whether somebody has asked since the last time."""
    asked, _WISH.open = _WISH.open, False
    return asked
