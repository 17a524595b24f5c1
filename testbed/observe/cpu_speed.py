"""How much all CPUs of this machine do now: other processes, a hypervisor and a lower clock make it less."""

from __future__ import annotations

import hashlib
import os
import threading
import time

__all__ = ["hash_rate"]

_BLOCK = bytes(1 << 20)
"""Long enough that hashlib releases the interpreter lock, so that threads use all CPUs."""


def hash_rate(seconds: float = 0.5) -> float:
    """Return how many bytes/s SHA-256 hashes on all CPUs together, measured for `seconds`.

    It is a ratio to another value of the same machine that counts: half of it means that half of the CPU time is gone.
    """
    began_s = time.monotonic()
    counts: list[int] = []

    def work() -> None:
        blocks = 0
        while time.monotonic() < began_s + seconds:
            hashlib.sha256(_BLOCK).digest()
            blocks += 1
        counts.append(blocks)

    threads = [threading.Thread(target=work, name="hash rate", daemon=True) for _ in range(os.cpu_count() or 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10 * seconds)
    # A thread that has not ended by then hardly ran: its blocks do not count.
    return sum(counts) * len(_BLOCK) / (time.monotonic() - began_s)
