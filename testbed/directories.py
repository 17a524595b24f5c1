"""Folders of faultbed on the controller.

FAULTBED_HOME    (default ~/.local/state/faultbed)   state of labs: labs/NAME/
FAULTBED_CACHE   (default ~/.cache/faultbed)         rebuilt if missing: images/, snapshots/
"""

from __future__ import annotations

import hashlib
import os
import pwd
from pathlib import Path

from faultbed.testbed.errors import LabError

__all__ = [
    "SOCKET_PATH_MAX",
    "act_as_owner",
    "cache_dir",
    "home_dir",
    "lab_dir",
    "private_dir",
    "short_dir",
    "socket_dir",
]

SOCKET_PATH_MAX = 107
"""Longest path of a unix socket in bytes (unix(7))."""
_LONGEST_SOCKET_NAME = 40


def home_dir() -> Path:
    """Return the folder of all lab state."""
    return _from_environment("FAULTBED_HOME", "XDG_STATE_HOME", ".local/state")


def act_as_owner() -> str | None:
    """Become the user who owns the labs' state, if root runs a command on it (sudo), and return that user's name.

    Root would leave files there that the owner cannot replace, and VMs that the owner cannot end. Returns None, and
    changes nothing, for every other user and for root's own state.
    """
    if os.geteuid() != 0:
        return None
    home = home_dir()
    try:
        owner = home.stat()
    except OSError:
        return None
    if owner.st_uid == 0:
        return None
    os.environ["FAULTBED_HOME"] = str(home)
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
        os.environ.pop(name, None)
    try:
        user = pwd.getpwuid(owner.st_uid)
    except KeyError:  # for example a user of a container
        os.environ["HOME"] = str(home)
        name, group = str(owner.st_uid), owner.st_gid
        os.setgroups([])
    else:
        os.environ |= {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name}
        name, group = user.pw_name, user.pw_gid
        os.initgroups(name, group)
    os.setresgid(group, group, group)
    os.setresuid(owner.st_uid, owner.st_uid, owner.st_uid)
    return name


def cache_dir() -> Path:
    """Return the folder of images and snapshots, which are rebuilt if missing."""
    return _from_environment("FAULTBED_CACHE", "XDG_CACHE_HOME", ".cache")


def lab_dir(name: str) -> Path:
    """Return the state folder of one lab."""
    return home_dir() / "labs" / name


def private_dir(path: Path) -> Path:
    """Create a folder that only this user can enter.

    Raises:
        LabError: it exists and belongs to another user, or is a link.
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
    """Return the folder of a lab's unix sockets: in its state folder, or the short one if paths would be too long.

    It never depends on the caller's environment. `XDG_RUNTIME_DIR` is missing in cron and under sudo, and logging out
    removes it. A running lab records its folder: `faultbed.testbed.backends.soft.lab_state.sockets_of`.
    """
    inside = lab / "sockets"
    return inside if len(os.fsencode(inside)) + _LONGEST_SOCKET_NAME < SOCKET_PATH_MAX else short_dir(lab)


def short_dir(lab: Path) -> Path:
    """Return a folder with a short path for a lab's unix sockets, outside its state folder.

    It lies in `/tmp` whatever `TMPDIR` says. Cleaners leave live sockets alone: systemd-tmpfiles reads
    `/proc/net/unix` first (tmpfiles.c, unix_socket_alive), tmpwatch and tmpreaper remove no sockets by default.
    """
    try:
        owner = lab.stat().st_uid  # root uses the folder of the lab's user
    except OSError:
        owner = os.getuid()
    name = hashlib.sha256(os.fsencode(lab.resolve())).hexdigest()[:12]
    return Path("/tmp") / f"faultbed-{owner}" / name  # noqa: S108 (made by `private_dir`)


def _from_environment(own: str, xdg: str, fallback: str) -> Path:
    if value := os.environ.get(own):
        path = Path(value).expanduser()
        if not path.is_absolute():  # a later change of the working directory must not move the labs
            os.environ[own] = str(path.absolute())
        return path.resolve()
    base = os.environ.get(xdg)
    return (Path(base) if base else Path.home() / fallback) / "faultbed"
