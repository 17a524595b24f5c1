"""Durable files: when a call returns, content, name and folder are synced to disk."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

__all__ = ["replace", "sync_folder", "write_new"]


def replace(path: Path, content: bytes) -> None:
    """Write a file atomically; an earlier file of that name is replaced.

    Raises:
        OSError: it cannot be written; the earlier file is unchanged.
    """
    temporary = write_new(path, content)
    try:
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_new(path: Path, content: bytes) -> Path:
    """Write a synced temporary file beside `path` for the caller to rename or link; return its path.

    Raises:
        OSError: it cannot be written; no temporary file is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.new")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder: without this, a power failure may undo a rename (fsync(2)).

    Raises:
        OSError: the folder is gone, or cannot be synced.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
