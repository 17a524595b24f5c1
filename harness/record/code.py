"""Which code this is: a digest of our own sources, because a version stays the same while somebody works on it."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

__all__ = ["digest", "digest_of"]

_FLOORS = ("harness", "inject", "testbed", "traffic")


@functools.cache
def digest() -> str:
    """Of the Python sources of this faultbed, read once a process; 16 hexadecimal digits."""
    return digest_of(Path(__file__).resolve().parents[2])


def digest_of(house: Path) -> str:
    """Of the Python sources below `house`: of their contents and of where they lie."""
    whole = hashlib.sha256()
    for path in sorted(path for floor in _FLOORS for path in (house / floor).rglob("*.py")):
        content = path.read_bytes()
        whole.update(f"{path.relative_to(house)} {len(content)}\n".encode())
        whole.update(content)
    return whole.hexdigest()[:16]
