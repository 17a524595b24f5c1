"""Read text files that people write: UTF-8, with or without a byte order mark."""

from __future__ import annotations

import errno
from pathlib import Path

from faultbed.testbed.errors import ConfigError

__all__ = ["decoded", "read_text"]


def read_text(path: Path, remedy: str) -> str:
    """Return the content of a text file; `remedy` says what to name instead if it cannot be read.

    Raises:
        ConfigError: there is no such file, it is a folder, it cannot be read, or it is not UTF-8.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        problem = "is a folder" if error.errno == errno.EISDIR else str(error.strerror or error)
        raise ConfigError(f"{path}: {problem}; {remedy}") from error
    return decoded(content, str(path))


def decoded(content: bytes, source: str) -> str:
    """Return the text of a file. A byte order mark, which editors of Windows write, is no part of it.

    Raises:
        ConfigError: it is not UTF-8; the message has line and byte.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{source}: line {line}: byte 0x{content[error.start]:02x} is not UTF-8; save it as a text file in UTF-8"
        ) from error
