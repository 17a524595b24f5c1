"""A digest of faultbed's own sources, because edits of the code do not change its version number."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

__all__ = ["digest", "digest_of"]

_PACKAGES = ("harness", "inject", "testbed", "traffic")


@functools.cache
def digest() -> str:
    """Return the digest of the running faultbed's Python sources (16 hexadecimal digits), read once per process."""
    return digest_of(Path(__file__).resolve().parents[2])


def digest_of(root: Path) -> str:
    """Return the digest of the Python sources below `root`, from their paths and contents."""
    sha256 = hashlib.sha256()
    for path in sorted(path for package in _PACKAGES for path in (root / package).rglob("*.py")):
        content = path.read_bytes()
        sha256.update(f"{path.relative_to(root)} {len(content)}\n".encode())
        sha256.update(content)
    return sha256.hexdigest()[:16]
