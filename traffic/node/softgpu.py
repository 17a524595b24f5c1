"""The soft GPU: a compute process whose speed is limited by its cgroup.

    python3 -m faultbed.traffic.node.softgpu /run/faultbed/gpu0.sock

A client connects and sends lines `{"units": K}`. The answer to each is `{"ns": elapsed, "units": K}` after K numpy
matrix products of 96 x 96 fp32. Clients share the GPU as kernels share a GPU without MPS: one request at a time, in
turn. An invalid request is answered with `{"error": ...}`. So is a request that meets an uncorrected memory error,
which a fault has written into the GPU's synthetic health (`faultbed.testbed.node.gpu.health`): the program that sent
it cannot continue. On SIGTERM the process ends and removes its socket.
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

from faultbed.testbed.node.gpu.health import FaultyMemory, Health

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Work = Callable[[int], None]

__all__ = ["answer", "main", "serve"]

SIDE = 96


def answer(line: bytes, work: Work) -> dict[str, Any]:
    """Return the answer to one request line, after `work(units)` has done the work."""
    try:
        units = json.loads(line)["units"]
        if not isinstance(units, int) or isinstance(units, bool) or units < 0:
            return {"error": f"units must be a whole number from 0 on, got {units!r}"}
    except (ValueError, KeyError, TypeError) as error:
        return {"error": f"not a request: {error!r}"}
    start = time.monotonic_ns()
    work(units)
    return {"ns": time.monotonic_ns() - start, "units": units}


def _serve_client(client: socket.socket, waiting: dict[socket.socket, bytes], work: Work, memory: FaultyMemory) -> bool:
    """Serve the next request of a client that has sent something; return False if the client is gone."""
    try:
        data = client.recv(4096)
        if not data:
            return False
        waiting[client] += data
        while b"\n" in waiting[client]:
            line, _, waiting[client] = waiting[client].partition(b"\n")
            failure = memory.failure()
            reply = answer(line, work) if failure is None else {"error": failure}
            client.sendall(json.dumps(reply).encode() + b"\n")
    except OSError:  # the client closed the connection during an answer
        return False
    return True


def serve(path: str) -> None:
    """Serve clients on the unix socket `path`, in turn, until the process ends."""
    import numpy as np  # `faultbed.traffic.node.cudagpu` imports this module and does not need numpy

    left, right, product = (np.full((SIDE, SIDE), value, dtype=np.float32) for value in (1.0, 1.0 / SIDE, 0.0))

    def work(units: int) -> None:
        for _ in range(units):
            np.matmul(left, right, out=product)

    work(1)  # the first product includes BLAS initialisation
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    waiting: dict[socket.socket, bytes] = {}
    memory = FaultyMemory(Health(os.path.basename(path).removesuffix(".sock")))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(16)
        while True:
            ready, _, _ = select.select([listener, *waiting], [], [])
            for ready_socket in ready:
                if ready_socket is listener:
                    waiting[listener.accept()[0]] = b""
                elif not _serve_client(ready_socket, waiting, work, memory):
                    del waiting[ready_socket]
                    ready_socket.close()


def main() -> None:
    """Run the service."""
    if len(sys.argv) != 2:  # noqa: PLR2004
        sys.exit("usage: python3 -m faultbed.traffic.node.softgpu SOCKET")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        serve(sys.argv[1])
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(sys.argv[1])


if __name__ == "__main__":
    main()
