"""A digest of faultbed's own sources, because edits of the code do not change its version number."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

from faultbed.testbed import shipped

__all__ = ["digest", "digest_of"]


@functools.cache
def digest() -> str:
    """Return the digest of the running faultbed's Python sources (16 hexadecimal digits), read once per process."""
    return digest_of(shipped.sources())


def digest_of(files: Iterable[tuple[str, Path]]) -> str:
    """Return the digest of files, from their names and contents."""
    sha256 = hashlib.sha256()
    for name, path in files:
        content = path.read_bytes()
        sha256.update(f"{name} {len(content)}\n".encode())
        sha256.update(content)
    return sha256.hexdigest()[:16]
