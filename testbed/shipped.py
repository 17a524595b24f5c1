"""Locate the files of faultbed's import package: its sources, playbooks, inventories and first experiments."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator
from pathlib import Path

from faultbed.testbed.errors import UsageError
from faultbed.testbed.suggestions import nearest

__all__ = [
    "PARTS",
    "experiment_named",
    "experiments",
    "import_root",
    "inventories",
    "inventory_named",
    "inventory_word",
    "playbooks",
    "sources",
]

PARTS = ("harness", "inject", "testbed", "traffic")
"""Folders of the package that contain code. In a checkout they are links, which no recursive search enters."""


def import_root() -> Path:
    """Return the folder from which `faultbed` is imported: what PYTHONPATH must contain for another interpreter."""
    return _package().parent


def sources(*folders: str) -> Iterator[tuple[str, Path]]:
    """Yield the Python files of the package, sorted: name ("faultbed/testbed/lab.py") and path.

    Args:
        folders: folders below the package; without any, the whole package.
    """
    package = _package()
    found = [*package.glob("*.py")] if not folders else []
    for folder in folders or PARTS:
        found += (package / folder).rglob("*.py")
    for path in sorted(found):
        yield f"{package.name}/{path.relative_to(package).as_posix()}", path


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


def experiments() -> Path:
    """Return the folder of the experiments that come with faultbed.

    Raises:
        UsageError: it does not exist, because the installation is incomplete.
    """
    return _shipped("experiments")


def inventory_named(text: str) -> Path:
    """Return the inventory that a user means: a file, or the name of one of faultbed's own (`soft-mini`).

    A text with a folder or a suffix is always a path. The path is returned even if there is no such file.

    Raises:
        UsageError: `text` is a plain word, and there is neither a file nor an inventory of that name.
    """
    return _named(text, inventories(), ".yml", "inventory")


def inventory_word(path: Path) -> str:
    """Return what a command needs to find this inventory again: the name of one of faultbed's own, or the path."""
    return path.stem if path.resolve().parent == inventories().resolve() else str(path)


def experiment_named(text: str) -> Path:
    """Return the experiment that a user means: a file, or the name of one of faultbed's own (`demo`).

    A text with a folder or a suffix is always a path. The path is returned even if there is no such file.

    Raises:
        UsageError: `text` is a plain word, and there is neither a file nor an experiment of that name.
    """
    return _named(text, experiments(), ".toml", "experiment")


def _named(text: str, folder: Path, suffix: str, what: str) -> Path:
    path = Path(text)
    if path.exists():
        return path
    named = folder / f"{text}{suffix}"
    if named.exists():
        return named
    if path.suffix or len(path.parts) > 1:
        return path
    known = sorted(path.stem for path in folder.glob(f"*{suffix}"))
    near = nearest(text, known)
    meant = f"did you mean {near}? " if near else ""
    raise UsageError(f'no {what} "{text}"; {meant}Give a path, or one of these names: {", ".join(known)}')


def _package() -> Path:
    return Path(str(importlib.resources.files("faultbed")))


def _shipped(name: str) -> Path:
    folder = _package() / name
    if not folder.is_dir():
        raise UsageError(f"{folder}: this folder is missing; install faultbed again")
    return folder
