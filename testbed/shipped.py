"""Locate the installed files that are not Python: playbooks and inventories."""

from __future__ import annotations

from pathlib import Path

from testbed.errors import UsageError

__all__ = ["inventories", "inventory_named", "playbooks"]


def playbooks() -> Path:
    """Return the folder of faultbed's playbooks.

    Raises:
        UsageError: it does not exist, because the installation is incomplete.
    """
    return _shipped("playbooks")


def inventories() -> Path:
    """Return the folder of faultbed's inventories.

    Raises:
        UsageError: it does not exist, because the installation is incomplete.
    """
    return _shipped("inventory")


def inventory_named(text: str) -> Path:
    """Return the inventory that a user means: a file, or the name of one of faultbed's own (`soft-mini`).

    A text with a folder or a suffix is always a path. The path is returned even if there is no such file.

    Raises:
        UsageError: `text` is a plain word, and there is neither a file nor an inventory of that name.
    """
    path = Path(text)
    if path.exists():
        return path
    named = inventories() / f"{text}.yml"
    if named.exists():
        return named
    if path.suffix or len(path.parts) > 1:
        return path
    known = ", ".join(sorted(path.stem for path in inventories().glob("*.yml")))
    raise UsageError(f'no inventory "{text}": give a path, or one of these names: {known}')


def _shipped(name: str) -> Path:
    """Return a folder inside the package (installed from a wheel) or beside it (a checkout)."""
    package = Path(__file__).resolve().parent
    for folder in (package / "_data" / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise UsageError(f"{package}: the folder {name} is missing; install faultbed again")
