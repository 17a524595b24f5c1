"""Where the files are that are no Python but travel with us: playbooks and inventories."""

from __future__ import annotations

from pathlib import Path

from testbed.errors import UsageError

__all__ = ["inventories", "inventory_named", "playbooks"]


def playbooks() -> Path:
    """Our playbooks.

    Raises:
        UsageError: they are not there, the installation is not whole.
    """
    return _shipped("playbooks")


def inventories() -> Path:
    """Our inventories.

    Raises:
        UsageError: they are not there, the installation is not whole.
    """
    return _shipped("inventory")


def inventory_named(text: str) -> Path:
    """The inventory that a person means by `text`: a file, or the name of one of ours (`soft-mini`).

    Raises:
        UsageError: no such file, and none of ours has that name.
    """
    path = Path(text)
    if path.exists():
        return path
    named = inventories() / f"{text}.yml"
    if named.exists():
        return named
    if path.suffix or len(path.parts) > 1:
        return path
    known = ", ".join(sorted(found.stem for found in inventories().glob("*.yml")))
    raise UsageError(f'no inventory "{text}": give the path of one, or one of ours: {known}')


def _shipped(name: str) -> Path:
    """Inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for found in (package / "_data" / name, package.parent / name):
        if found.is_dir():
            return found
    raise UsageError(f"{package}: the folder {name} is missing, install faultbed again")
