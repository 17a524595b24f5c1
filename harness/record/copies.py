"""Recognise run directories that hold the same run: a copy is no second observation."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:  # its types take half a second to import, and a query reads none of them
    from faultbed.harness.record.evidence.run_evidence import RunEvidence

__all__ = ["copies_among", "digest_of"]

_SAMPLE_BYTES = 4096


def digest_of(run: RunEvidence) -> str:
    """Return the SHA-256 of what a run recorded in hex. No two runs share one, because they hold their own times."""
    return hashlib.sha256(msgspec.json.encode(run)).hexdigest()


def copies_among(files: Sequence[Path]) -> dict[Path, Path]:
    """Return the files with the same bytes as an earlier one, each with the first such file.

    Most runs are told apart by the size of their file or by a few kilobytes of it; only those that agree in both are
    read whole.

    Raises:
        OSError: a file cannot be read.
    """
    original_of: dict[Path, Path] = {}
    for same_size in _grouped((path.stat().st_size, path) for path in files):
        for same_samples in _grouped((_samples(path), path) for path in same_size):
            for same in _grouped((hashlib.sha256(path.read_bytes()).digest(), path) for path in same_samples):
                original_of |= dict.fromkeys(same[1:], same[0])
    return original_of


def _grouped(keyed: Iterable[tuple[object, Path]]) -> Iterator[list[Path]]:
    """Yield the paths of each key that two or more paths share, in their order."""
    groups: dict[object, list[Path]] = {}
    for key, path in keyed:
        groups.setdefault(key, []).append(path)
    return (group for group in groups.values() if len(group) > 1)


def _samples(path: Path) -> bytes:
    """Return some kilobytes from the middle and the end of a file; its start is the same in all runs of a lab."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        return b"".join(os.pread(descriptor, _SAMPLE_BYTES, max(0, at)) for at in (size // 2, size - _SAMPLE_BYTES))
    finally:
        os.close(descriptor)
