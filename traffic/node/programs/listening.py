"""Whether processes wait for connections: on a TCP socket, or by the RDMA connection manager."""

from __future__ import annotations

import os

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["listens"]

_LISTEN = "0A"
_SOCKET = "socket:["
_RDMA_CM = "/dev/infiniband/rdma_cm"


def listens(pids: Iterable[int]) -> bool:
    """Return whether one of the processes has a TCP socket that listens.

    A listener of the RDMA connection manager cannot be told from a client: a process that has opened
    `/dev/infiniband/rdma_cm` counts.
    """
    targets = {target for pid in pids for target in _open_files(pid)}
    if _RDMA_CM in targets:
        return True
    listening = {inode for table in ("tcp", "tcp6") for inode in _listening(table)}
    return any(target == f"{_SOCKET}{inode}]" for target in targets for inode in listening)


def _open_files(pid: int) -> Iterator[str]:
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            try:
                yield os.readlink(f"{folder}/{name}")
            except OSError:
                continue
    except OSError:
        return


def _listening(table: str) -> Iterator[str]:
    try:
        with open(f"/proc/net/{table}", encoding="ascii") as file:
            for line in file.readlines()[1:]:
                words = line.split()
                if words[3] == _LISTEN:
                    yield words[9]
    except (OSError, IndexError):
        return
