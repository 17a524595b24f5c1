"""Where the files are that are no Python but travel with us: playbooks and inventories."""

from __future__ import annotations

from pathlib import Path

from testbed.errors import UsageError

__all__ = ["playbooks"]


def playbooks() -> Path:
    """Our playbooks: inside the package when installed from a wheel, beside it in a checkout.

    Raises:
        UsageError: neither is there, the installation is not whole.
    """
    package = Path(__file__).resolve().parent
    for found in (package / "_data" / "playbooks", package.parent / "playbooks"):
        if found.is_dir():
            return found
    raise UsageError(f"{package}: the playbooks are missing, install faultbed again")
