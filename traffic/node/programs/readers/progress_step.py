"""What a program did between two times, as it reported it."""

from __future__ import annotations

from collections import namedtuple

__all__ = ["Step"]

Step = namedtuple("Step", ("start_ns", "end_ns", "size_bytes", "is_iteration", "wrong"), defaults=(False, 0))  # noqa: PYI024  # typing costs an emulated CPU 0.2 s
Step.__doc__ = """Progress in [start_ns, end_ns): bytes, an iteration, and the wrong elements that the program counted.

A step without bytes that is no iteration says only that the program has begun to make progress.
"""
