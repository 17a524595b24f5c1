"""Storage server on the front end: hosts read training data from it and write checkpoints to it, over TCP.

    python3 -m faultbed.traffic.node.storage 10.79.0.4 [--keep FOLDER COUNT]

It prints {"event": "listening", "port": N} and serves until its stdin ends, with one thread per client. A client sends
lines:

    {"get": bytes}              the answer is {"bytes": N, "crc": C} and N bytes with CRC-32 C
    {"put": bytes, "crc": C}    followed by the bytes; the answer is {"stored": bytes}, or {"error": ...} on a mismatch
    {"put": bytes, "crc": C, "rank": r, "ranks": n, "iterations": i, "generation": g}
                                the same for a checkpoint, which is kept in FOLDER (`faultbed.traffic.node.checkpoints`)
    {"restore": i, "rank": r, "generation": g}
                                the answer is a checkpoint as for `get`, or {"error": ...}

A `put` that is no checkpoint is verified and discarded: it loads the front end, not a disk.

The controller sends lines on stdin. {"do": "newest", "ranks": [[g, n], ...]} is answered by the newest complete set of
checkpoints of a generation g with n ranks; without "ranks", of any generation. {"do": "ping"} is answered at once. A
request with "seq" gets a reply with the same "seq". FOLDER is removed when stdin ends, because the controller is gone
or the job is over.
"""

from __future__ import annotations

import json
import socketserver
import sys
import threading
import zlib

from faultbed.traffic.node.checkpoints import HEADER, Checkpoints

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
        except (ConnectionError, TimeoutError, EOFError):
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
        if "restore" in request:
            self._restore(request)
            return True
        if "rank" in request:
            return self._store(request, size_bytes)
        crc = _receive_checksum(self.rfile, size_bytes)
        if crc is None:
            return False
        self._reply(
            {"stored": size_bytes}
            if crc == request.get("crc")
            else {"error": "checksum mismatch: the received bytes differ from those sent"}
        )
        return True

    def _store(self, request: dict[str, Any], size_bytes: int) -> bool:
        checkpoints = self._checkpoints()
        header, data = {**request, "bytes": size_bytes}, _Data(self.rfile, size_bytes)
        if checkpoints is None or not all(isinstance(header.get(field), int) for field in HEADER):
            reason = "it was started without --keep" if checkpoints is None else f"it needs {', '.join(HEADER)}"
            data.discard()
            self._reply({"error": f"this storage cannot keep the checkpoint: {reason}"})
            return True
        try:
            problem = checkpoints.store(header, data)
        except (ConnectionError, TimeoutError):
            raise
        except OSError as error:  # such as a full disk
            data.discard()  # a connection that is closed with unread data is reset, and the reply is lost
            problem = f"the checkpoint was not stored: {error.strerror}"
        self._reply({"stored": size_bytes} if problem is None else {"error": problem})
        return True

    def _restore(self, request: dict[str, Any]) -> None:
        checkpoints = self._checkpoints()
        try:
            if checkpoints is None:
                raise FileNotFoundError(2, "this storage keeps no checkpoints")
            header, file = checkpoints.open(request["generation"], request["rank"], request["restore"])
        except (OSError, ValueError, KeyError) as error:
            self._reply({"error": f"no checkpoint {request}: {error}"})
            return
        with file:
            self._reply({"bytes": header["bytes"], "crc": header["crc"]})
            while data := file.read(BLOCK_BYTES):
                self.wfile.write(data)

    def _checkpoints(self) -> Checkpoints | None:
        return self.server.checkpoints if isinstance(self.server, _Server) else None

    def _reply(self, answer: dict[str, object]) -> None:
        self.wfile.write(json.dumps(answer).encode() + b"\n")


class _Data:
    """The data of one request, which ends after `left` bytes of the stream."""

    def __init__(self, file: BufferedIOBase, size_bytes: int) -> None:
        self._file, self.left = file, size_bytes

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes; none at the end of the data or of the stream."""
        data = self._file.read(min(size, self.left))
        self.left -= len(data)
        return data

    def discard(self) -> None:
        """Read what is left."""
        while self.read(BLOCK_BYTES):
            pass


def _parse_request(line: bytes) -> tuple[dict[str, Any] | None, int]:
    """Parse a request: its fields and its size in bytes. Fields are None if the line is not a valid request."""
    try:
        request = json.loads(line)
    except ValueError:
        return None, 0
    size_bytes = request.get("get", request.get("put", request.get("restore"))) if isinstance(request, dict) else None
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
    checkpoints: Checkpoints | None = None


def main() -> None:
    """Run the server."""
    checkpoints = None
    if "--keep" in sys.argv:
        folder, keep = sys.argv[sys.argv.index("--keep") + 1 :][:2]
        checkpoints = Checkpoints(folder, int(keep))
    try:
        with _Server((sys.argv[1], 0), _Client) as server:
            server.checkpoints = checkpoints
            threading.Thread(target=server.serve_forever, daemon=True).start()
            print(json.dumps({"event": "listening", "port": server.server_address[1]}), flush=True)
            for line in sys.stdin.buffer:  # ends when the controller closes the channel
                _answer_controller(json.loads(line), checkpoints)
            server.shutdown()
    finally:
        if checkpoints is not None:
            checkpoints.remove()


def _answer_controller(request: dict[str, Any], checkpoints: Checkpoints | None) -> None:
    reply: dict[str, Any] = {"event": request.get("do"), "seq": request.get("seq")}
    if reply["event"] == "newest" and checkpoints is not None:
        ranks_of = request.get("ranks")
        reply |= checkpoints.newest(None if ranks_of is None else dict(ranks_of))
    elif reply["event"] != "ping":
        return
    print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
