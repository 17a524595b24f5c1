"""Fixtures of the run loop's tests."""

from synthetic_sweep import executed

__all__ = ["executed"]
