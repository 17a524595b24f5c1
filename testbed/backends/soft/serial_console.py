"""What a VM's kernel said on its serial console when it died."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["FILE", "panic", "panic_told"]

FILE = "console.log"
"""In the folder of a VM."""

_TAIL_BYTES = 64 * 1024
_STAMP = r"^\[ *\d+\.\d+\] "
_PANIC = re.compile(_STAMP + r"Kernel panic - not syncing: (.+)$", re.MULTILINE)
_OOPS = re.compile(_STAMP + r"(?:Oops: |BUG: |traps: PANIC: )(.+)$", re.MULTILINE)
_WORK = re.compile(_STAMP + r"(?:RIP: \S+?:)(\S+)\+0x", re.MULTILINE)


def panic(console: Path) -> str | None:
    """Why the kernel that writes to this console panicked, in its own words; None: it did not.

    The file begins anew with each QEMU process, so what is in it is of the VM that runs. Words of the kernel:
    kernel/panic.c, arch/x86/kernel/dumpstack.c.
    """
    try:
        with console.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            said = file.read().decode(errors="replace").replace("\r", "")
    except FileNotFoundError:
        return None
    died = _PANIC.search(said)
    if died is None:
        return None
    before, words = said[: died.start()], [died[1].strip()]
    if oops := _OOPS.search(before):
        words.append(oops[1].strip())
    if work := _WORK.search(before):
        words.append(f"in {work[1]}")
    return ", ".join(words)


def panic_told(console: Path) -> str | None:
    """The same in a sentence that says what to do."""
    words = panic(console)
    return words and f"its kernel panicked: {words} ({console}); `faultbed reset` starts it again"
