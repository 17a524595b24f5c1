"""Optional packages of faultbed, which only some users need: the extras of its installation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from faultbed.testbed.errors import UsageError

__all__ = ["extra"]


@contextlib.contextmanager
def extra(name: str, needed_for: str) -> Iterator[None]:
    """Import packages of an extra in this context; a missing one becomes one sentence with the command to install it.

    Args:
        name: the extra ("fuzz").
        needed_for: what needs its packages ("`faultbed fuzz`").

    Raises:
        UsageError: a package of the extra is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("faultbed"):
            raise
        raise UsageError(
            f"{needed_for} needs the package {error.name}, which is not installed; run: pip install 'faultbed[{name}]'"
        ) from error
