"""How much all CPUs of this machine do now: other processes, a hypervisor and a lower clock make it less."""

from __future__ import annotations

import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor

__all__ = ["hash_rate"]

_BLOCK = bytes(1 << 20)
"""Long enough that hashlib releases the interpreter lock, so that threads use all CPUs."""


def hash_rate(seconds: float = 0.5) -> float:
    """Return how many bytes/s SHA-256 hashes on all CPUs together, measured for `seconds`.

    It is a ratio to another value of the same machine that counts: half of it means that half of the CPU time is gone.
    """

    def work(until_s: float) -> int:
        blocks = 0
        while time.monotonic() < until_s:
            hashlib.sha256(_BLOCK).digest()
            blocks += 1
        return blocks

    count = os.cpu_count() or 1
    with ThreadPoolExecutor(max_workers=count) as pool:
        began_s = time.monotonic()
        blocks = sum(pool.map(work, [began_s + seconds] * count))
        return blocks * len(_BLOCK) / (time.monotonic() - began_s)
