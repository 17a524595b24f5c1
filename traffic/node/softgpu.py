"""The soft GPU: a compute process that does what it is asked, as fast as its cgroup lets it.

    python3 -m traffic.node.softgpu /run/faultbed/gpu0.sock

A client connects and sends lines `{"units": K}`; the answer to each is `{"ns": elapsed, "units": K}` after K numpy
matrix products of 96 x 96 fp32. Several clients share it as kernels share a GPU without MPS: one request at a time, in
turn. An unreadable request is answered with `{"error": ...}`. Ends on SIGTERM, leaving no socket behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["main", "serve"]

SIDE = 96


def _compute(units: int, a: npt.NDArray[np.float32], b: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> int:
    start = time.monotonic_ns()
    for _ in range(units):
        np.matmul(a, b, out=out)
    return time.monotonic_ns() - start


def _answer(line: bytes, matrices: tuple[Any, ...]) -> dict[str, Any]:
    try:
        units = json.loads(line)["units"]
        if not isinstance(units, int) or isinstance(units, bool) or units < 0:
            return {"error": f"units must be a whole number from 0 on, got {units!r}"}
    except (ValueError, KeyError, TypeError) as error:
        return {"error": f"not a request: {error!r}"}
    return {"ns": _compute(units, *matrices), "units": units}


def _serve_client(client: socket.socket, waiting: dict[socket.socket, bytes], matrices: tuple[Any, ...]) -> bool:
    """The next request of a client that has sent something; False: it has gone."""
    try:
        data = client.recv(4096)
        if not data:
            return False
        waiting[client] += data
        while b"\n" in waiting[client]:
            line, _, waiting[client] = waiting[client].partition(b"\n")
            client.sendall(json.dumps(_answer(line, matrices)).encode() + b"\n")
    except OSError:  # it went in the middle of an answer
        return False
    return True


def serve(path: str) -> None:
    """Serve clients on the unix socket `path`, in turn, for ever."""
    matrices = tuple(np.full((SIDE, SIDE), value, dtype=np.float32) for value in (1.0, 1.0 / SIDE, 0.0))
    _compute(1, *matrices)  # the first product pays for what BLAS sets up
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    waiting: dict[socket.socket, bytes] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(16)
        while True:
            ready, _, _ = select.select([listener, *waiting], [], [])
            for one in ready:
                if one is listener:
                    waiting[listener.accept()[0]] = b""
                elif not _serve_client(one, waiting, matrices):
                    del waiting[one]
                    one.close()


def main() -> None:
    """Entry point of the service."""
    if len(sys.argv) != 2:  # noqa: PLR2004
        sys.exit("usage: python3 -m traffic.node.softgpu SOCKET")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        serve(sys.argv[1])
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(sys.argv[1])


if __name__ == "__main__":
    main()
