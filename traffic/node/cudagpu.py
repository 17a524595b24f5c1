"""GPU compute for one traffic engine, in a separate process, so that a running kernel does not delay completions.

    python3 -m faultbed.traffic.node.cudagpu DESCRIPTOR NUMBER [PCIE]

The process serves the socket that it inherited as `DESCRIPTOR`, with the protocol of the soft GPU
(`faultbed.traffic.node.softgpu`). It ends when the other end is closed. If the GPU is unavailable it sends `{"error":
...}` and ends.
"""

from __future__ import annotations

import json
import socket
import sys

from faultbed.testbed.node.gpu.cuda import CudaWork, NoCuda
from faultbed.traffic.node.softgpu import answer

__all__ = ["main", "serve"]


def serve(client: socket.socket, work: CudaWork) -> None:
    """Answer requests in order until the client closes the socket."""
    with client.makefile("rb") as lines:
        for line in lines:
            client.sendall(json.dumps(answer(line, work.compute)).encode() + b"\n")


def main() -> None:
    """Run the process."""
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
        except OSError:  # the engine closed the socket during a reply
            return


if __name__ == "__main__":
    main()
