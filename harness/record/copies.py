"""Recognise run directories that hold the same run: a copy is no second observation."""

from __future__ import annotations

import hashlib

import msgspec

from faultbed.harness.record.measurements import Measurements

__all__ = ["digest_of"]


def digest_of(measured: Measurements) -> str:
    """Return the SHA-256 of a run's measurements in hex. No two runs share one, because they hold their own times."""
    return hashlib.sha256(msgspec.json.encode(measured)).hexdigest()
