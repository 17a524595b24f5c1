"""A request, made by a signal to this process, to dump the flight recorders of running traffic.

A signal handler can interrupt any instruction, even while a lock is held. It therefore only records the request. The
next run that checks takes the request and serves it on its own thread (`traffic.engine.running_traffic`). A process has
one signal handler, so it has one request.
"""

from __future__ import annotations

from types import FrameType

__all__ = ["note", "take"]


class _Wish:
    """Whether a dump request is waiting to be served."""

    open = False


_WISH = _Wish()


def note(_number: int = 0, _frame: FrameType | None = None) -> None:
    """Record a dump request. The signature is that of a signal handler."""
    _WISH.open = True


def take() -> bool:
    """Return whether a dump was requested since the last call, and clear the request."""
    asked, _WISH.open = _WISH.open, False
    return asked
