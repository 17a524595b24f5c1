"""Small files below /proc and /sys: read in a third of the time that `open` takes on an emulated CPU."""

from __future__ import annotations

import contextlib
import os

__all__ = ["entries", "gid_of", "read"]


def read(path: str) -> str:
    """Return the content of a file.

    Raises:
        OSError: there is no such file, or it cannot be read.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = b""
        while part := os.read(file, 1 << 14):
            content += part
        return content.decode(errors="replace")
    finally:
        os.close(file)


def entries(folder: str) -> list[str]:
    """Return the sorted names in a folder; none if there is no such folder."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(os.listdir(folder))
    return []


def gid_of(address: str) -> str:
    """Return the GID of an IPv4 address, as sysfs and pyverbs write it.

    `ipaddress` is no help: from Python 3.13 on, it writes dots in a mapped address.
    """
    octet1, octet2, octet3, octet4 = (int(part) for part in address.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{octet1 << 8 | octet2:04x}:{octet3 << 8 | octet4:04x}"
