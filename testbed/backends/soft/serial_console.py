"""Find a kernel panic in the output of a VM's serial console."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["FILE", "panic", "panic_message"]

FILE = "console.log"
"""The file with the console's output, in the folder of a VM."""

_TAIL_BYTES = 64 * 1024
_STAMP = r"^\[ *\d+\.\d+\] "
_PANIC = re.compile(_STAMP + r"Kernel panic - not syncing: (.+)$", re.MULTILINE)
_OOPS = re.compile(_STAMP + r"(?:Oops: |BUG: |traps: PANIC: )(.+)$", re.MULTILINE)
_FUNCTION = re.compile(_STAMP + r"(?:RIP: \S+?:)(\S+)\+0x", re.MULTILINE)


def panic(console: Path) -> str | None:
    """Return the panic message of the kernel that writes to this console; None: it has not panicked.

    Each QEMU process truncates the file, so its content is that of the running VM. Source of the messages: Linux,
    kernel/panic.c, arch/x86/kernel/dumpstack.c.
    """
    try:
        with console.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            output = file.read().decode(errors="replace").replace("\r", "")
    except FileNotFoundError:
        return None
    died = _PANIC.search(output)
    if died is None:
        return None
    before, words = output[: died.start()], [died[1].strip()]
    if oops := _OOPS.search(before):
        words.append(oops[1].strip())
    if function := _FUNCTION.search(before):
        words.append(f"in {function[1]}")
    return ", ".join(words)


def panic_message(console: Path) -> str | None:
    """Return a message about a kernel panic, with what to do; None: there was none."""
    words = panic(console)
    return words and f"its kernel panicked: {words} ({console}); `faultbed reset` starts it again"
