"""A GPU's work for one traffic engine, in a process of its own: a kernel that runs holds up nobody else's completions.

    python3 -m traffic.node.cudagpu DESCRIPTOR NUMBER [PCIE]

Speaks on the socket that it inherited as `DESCRIPTOR`, as the soft GPU does on its own (`traffic.node.softgpu`). Ends
when the other end is closed, or with one last `{"error": ...}` where the GPU cannot be had. Not yet run on hardware.
"""

from __future__ import annotations

import json
import socket
import sys

from testbed.node.cuda import CudaWork, NoCuda
from traffic.node.softgpu import answer

__all__ = ["main", "serve"]


def serve(client: socket.socket, work: CudaWork) -> None:
    """Answer requests, one after the other, until nobody asks any more."""
    with client.makefile("rb") as lines:
        for line in lines:
            client.sendall(json.dumps(answer(line, work.compute)).encode() + b"\n")


def main() -> None:
    """Entry point of the process."""
    descriptor, number, *pcie = sys.argv[1:]
    with socket.socket(fileno=int(descriptor)) as client:
        try:
            work = CudaWork(pcie=pcie[0] if pcie else None, number=int(number))
            try:
                serve(client, work)
            finally:
                work.close()
        except NoCuda as error:
            client.sendall(json.dumps({"error": str(error)}).encode() + b"\n")
        except OSError:  # the engine went in the middle of an answer
            return


if __name__ == "__main__":
    main()
