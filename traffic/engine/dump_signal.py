"""A request, made by a signal to this process, to dump the flight recorders of running traffic.

A signal handler can interrupt any instruction, even while a lock is held. It therefore only records the request. The
next run that checks takes the request and serves it on its own thread (`faultbed.traffic.engine.running_traffic`). A
process has one signal handler, so it has one request.
"""

from __future__ import annotations

from types import FrameType

__all__ = ["request_dump", "take_request"]


class _DumpRequest:
    """Whether a dump request is waiting to be served."""

    is_pending = False


_REQUEST = _DumpRequest()


def request_dump(_number: int = 0, _frame: FrameType | None = None) -> None:
    """Record a dump request. The signature is that of a signal handler."""
    _REQUEST.is_pending = True


def take_request() -> bool:
    """Return whether a dump was requested since the last call, and clear the request."""
    was_pending, _REQUEST.is_pending = _REQUEST.is_pending, False
    return was_pending
