"""Storage server on the front end: hosts read training data from it and write checkpoints to it, over TCP.

    python3 -m traffic.node.storage 10.79.0.4

It prints {"event": "listening", "port": N} and serves until its stdin ends, with one thread per client. A client sends
lines:

    {"get": bytes}              the answer is {"bytes": N, "crc": C} and N bytes with CRC-32 C
    {"put": bytes, "crc": C}    followed by the bytes; the answer is {"stored": bytes}, or {"error": ...} on a mismatch

Stored data is verified and discarded: the purpose is to load the front end, not a disk.
"""

from __future__ import annotations

import json
import socketserver
import sys
import threading
import zlib

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from io import BufferedIOBase
    from typing import Any

__all__ = ["BLOCK_BYTES", "blocks", "checksum", "main"]

BLOCK_BYTES = 65536
_DATA = bytes(range(256)) * (BLOCK_BYTES // 256)


def blocks(block: bytes, size_bytes: int) -> list[memoryview]:
    """Return `size_bytes` of data as repetitions of a block; the last one may be partial."""
    whole, rest = divmod(size_bytes, len(block))
    view = memoryview(block)
    return [view] * whole + ([view[:rest]] if rest else [])


def checksum(parts: list[memoryview]) -> int:
    """Return the CRC-32 (ISO 3309, as in zlib) of all parts in order."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc


class _Client(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        try:
            for line in self.rfile:
                if not self._serve(line):
                    return
        except (ConnectionError, TimeoutError):
            return  # the client closed the connection during a request

    def _serve(self, line: bytes) -> bool:
        """Serve one request; return False if the rest of the stream cannot be parsed."""
        request, size_bytes = _parse_request(line)
        if request is None:
            self._reply({"error": f"not a request: {line.decode(errors='replace')[:80]}"})
            return False
        if "get" in request:
            parts = blocks(_DATA, size_bytes)
            self._reply({"bytes": size_bytes, "crc": checksum(parts)})
            for part in parts:
                self.wfile.write(part)
            return True
        crc = _receive_checksum(self.rfile, size_bytes)
        if crc is None:
            return False
        self._reply(
            {"stored": size_bytes}
            if crc == request.get("crc")
            else {"error": "checksum mismatch: the received bytes differ from those sent"}
        )
        return True

    def _reply(self, answer: dict[str, object]) -> None:
        self.wfile.write(json.dumps(answer).encode() + b"\n")


def _parse_request(line: bytes) -> tuple[dict[str, Any] | None, int]:
    """Parse a request: its fields and its size in bytes. Fields are None if the line is not a valid request."""
    try:
        request = json.loads(line)
    except ValueError:
        return None, 0
    size_bytes = request.get("get", request.get("put")) if isinstance(request, dict) else None
    return (request, size_bytes) if isinstance(size_bytes, int) and size_bytes >= 0 else (None, 0)


def _receive_checksum(file: BufferedIOBase, size_bytes: int) -> int | None:
    """Return the CRC-32 of the next `size_bytes`, or None if the stream ends before."""
    crc, left = 0, size_bytes
    while left:
        data = file.read(min(left, BLOCK_BYTES))
        if not data:
            return None
        crc, left = zlib.crc32(data, crc), left - len(data)
    return crc


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


def main() -> None:
    """Run the server."""
    with _Server((sys.argv[1], 0), _Client) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(json.dumps({"event": "listening", "port": server.server_address[1]}), flush=True)
        sys.stdin.buffer.read()  # ends when the controller closes the channel
        server.shutdown()


if __name__ == "__main__":
    main()
