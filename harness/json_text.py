"""Indented JSON for files that people read."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

__all__ = ["json_text"]


def json_text(value: Any, *, order: Literal["deterministic", "sorted"] | None = None, indent: int = 2) -> bytes:
    """Return a value as indented JSON with a newline at its end."""
    return msgspec.json.format(msgspec.json.encode(value, order=order), indent=indent) + b"\n"
