"""Where the files are that are no Python but travel with us: playbooks and inventories."""

from __future__ import annotations

from pathlib import Path

from testbed.errors import UsageError

__all__ = ["inventories", "playbooks"]


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


def _shipped(name: str) -> Path:
    """Inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for found in (package / "_data" / name, package.parent / name):
        if found.is_dir():
            return found
    raise UsageError(f"{package}: the folder {name} is missing, install faultbed again")
