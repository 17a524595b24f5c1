"""Where faultbed keeps things on the controller.

FAULTBED_HOME    (default ~/.local/state/faultbed)   state of labs: labs/NAME/
FAULTBED_CACHE   (default ~/.cache/faultbed)         what can be made again: images/, snapshots/
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from testbed.errors import LabError

__all__ = ["cache_dir", "home_dir", "lab_dir", "private_dir", "socket_dir"]


def home_dir() -> Path:
    """Folder of all lab state."""
    return _from_environment("FAULTBED_HOME", "XDG_STATE_HOME", ".local/state")


def cache_dir() -> Path:
    """Folder of what can be made again: images and snapshots."""
    return _from_environment("FAULTBED_CACHE", "XDG_CACHE_HOME", ".cache")


def lab_dir(name: str) -> Path:
    """State folder of one lab."""
    return home_dir() / "labs" / name


def private_dir(path: Path) -> Path:
    """Make a folder that only this user can enter.

    Raises:
        LabError: it exists and belongs to somebody else, or is a link.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    stat = path.lstat()
    if path.is_symlink() or stat.st_uid != os.getuid():
        raise LabError(
            f"{path} belongs to another user or is a link: remove it, or set FAULTBED_HOME to a folder of your own"
        )
    path.chmod(0o700)
    return path


def socket_dir(lab: Path) -> Path:
    """Folder of a lab's unix sockets, named after its state folder.

    Apart from the state, because a unix socket's path ends at 107 bytes (unix(7)).
    """
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    name = hashlib.sha256(str(lab).encode()).hexdigest()[:12]
    return base / f"faultbed-{os.getuid()}" / name


def _from_environment(own: str, xdg: str, fallback: str) -> Path:
    if value := os.environ.get(own):
        return Path(value).expanduser().resolve()
    base = os.environ.get(xdg)
    return (Path(base) if base else Path.home() / fallback) / "faultbed"
