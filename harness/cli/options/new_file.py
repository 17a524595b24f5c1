"""Files that a command writes at a user's request, and never over another one."""

from __future__ import annotations

from pathlib import Path

from faultbed.testbed.errors import UsageError

__all__ = ["write_new_file"]


def write_new_file(option: str, path: Path, content: bytes) -> None:
    """Write a file that does not exist yet; `option` is how messages name the request (`--write`).

    Raises:
        UsageError: there is a file of that name, or it cannot be written.
    """
    try:
        with path.open("xb") as file:
            file.write(content)
    except FileExistsError:
        raise UsageError(f"{option} {path}: exists already; name another file") from None
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror or error}; name a file in a folder that exists") from error
