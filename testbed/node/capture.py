"""Capture the headers of every frame at some ports of this machine, and prove that none is missing.

JSON lines on stdin and stdout, times in ns of this machine:

    {"do":"clock"}      {"event":"clock","monotonic_ns":N}
    {"do":"start","ports":[{"name","netns","netdev"}],"file":PATH,"snap":128,"limit_bytes":N}
                        {"event":"started","epoch_offset_ns":N}
    {"do":"stop"}       {"event":"stopped","ports":[{"name","before","captured","received","sent","drops"}],
                         "bytes":N,"epoch_offset_ns":N}
    an error            {"event":"error","error":"..."}

The kernel writes frames into a ring of blocks (packet_mmap, TPACKET_V3; linux/if_packet.h), and whole blocks are
written to the file unchanged. Python never handles single frames, because the switch needs its CPU time for forwarding.
The file is a sequence of blocks. Two 32-bit words precede each block: the index of its port, and its length.

The proof: the port's own counters and the socket's count are read at the start and at the end, when neither moves.
`received` and `sent` are the growth of the port's counters, `captured` that of the socket's count. The frames of each
direction must be as many as the port counted, and `drops` must be 0. The first `before` frames of the file arrived
before the first reading.
"""

from __future__ import annotations

import array
import contextlib
import json
import mmap
import os
import select
import socket
import struct
import sys
import time

from faultbed.testbed.node import netns

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from typing import Any, BinaryIO

__all__ = ["main", "write_whole"]

_SOL_PACKET, _RX_RING, _STATISTICS, _VERSION = 263, 5, 6, 10
_TPACKET_V3, _ETH_P_ALL, _SO_ATTACH_FILTER = 2, 3, 26
_BLOCK_BYTES, _BLOCKS, _FRAME_BYTES, _RETIRE_MS = 1 << 18, 16, 2048, 100
_BLOCK_STATUS, _BLOCK_LENGTH = 8, 20
_TO_USER = 1
_RETURN = 0x06
_PREFIX = struct.Struct("=II")
_QUIET_S, _PATIENCE_S = 0.03, 3.0


def write_whole(out: BinaryIO, content: bytes) -> None:
    """Write all of `content`: a disk that is nearly full takes a part without an error (write(2)).

    Raises:
        OSError: the disk is full.
    """
    rest = memoryview(content)
    while rest:
        rest = rest[out.write(rest) :]


class Port:
    """A packet socket with its ring on one port."""

    def __init__(self, name: str, namespace: str | None, netdev: str, snap: int) -> None:
        self.name, self.netdev = name, netdev
        self.link = netns.open_route(namespace)
        # Protocol 0: the socket receives nothing until it is bound, so it never has frames of other ports.
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
        self.socket.setsockopt(_SOL_PACKET, _VERSION, _TPACKET_V3)
        self._cut_to(snap)
        size = _BLOCK_BYTES * _BLOCKS
        request = (_BLOCK_BYTES, _BLOCKS, _FRAME_BYTES, size // _FRAME_BYTES, _RETIRE_MS, 0, 0)
        self.socket.setsockopt(_SOL_PACKET, _RX_RING, struct.pack("=7I", *request))
        self.ring = mmap.mmap(self.socket.fileno(), size)
        self.next = self.seen = self.drops = self.before = 0
        self.counted = (0, 0)
        self.socket.bind((netdev, _ETH_P_ALL))

    def _cut_to(self, snap: int) -> None:
        """Attach a filter of one instruction that accepts every frame and keeps this many bytes."""
        program = array.array("B", struct.pack("=HBBI", _RETURN, 0, 0, snap))
        filter_program = struct.pack("HP", 1, program.buffer_info()[0])
        self.socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_program)

    def move(self, index: int, out: BinaryIO) -> None:
        """Write the blocks that the kernel has finished, and return them to the kernel."""
        while True:
            at = self.next * _BLOCK_BYTES
            (status,) = struct.unpack_from("=I", self.ring, at + _BLOCK_STATUS)
            if not status & _TO_USER:
                return
            (length,) = struct.unpack_from("=I", self.ring, at + _BLOCK_LENGTH)
            write_whole(out, _PREFIX.pack(index, length) + self.ring[at : at + length])
            struct.pack_into("=I", self.ring, at + _BLOCK_STATUS, 0)
            self.next = (self.next + 1) % _BLOCKS

    def count(self) -> int:
        """Return the frames seen so far, including drops. Reading resets the kernel's own count."""
        frames, drops, _ = struct.unpack("=III", self.socket.getsockopt(_SOL_PACKET, _STATISTICS, 12))
        self.seen += frames
        self.drops += drops
        return self.seen

    def close(self) -> None:
        """Remove the tap."""
        self.ring.close()
        self.socket.close()
        self.link.close()


class Capture:
    """A capture of all ports in one file."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.path, self.limit, self.is_over = str(request["file"]), int(request["limit_bytes"]), False
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self.out = open(self.path, "wb", buffering=0)  # noqa: SIM115 - closed by `close`
        self.ports = [
            Port(port["name"], port["netns"], port["netdev"], int(request["snap"])) for port in request["ports"]
        ]
        for port, (frames, counted) in zip(self.ports, self._at_rest()):  # noqa: B905 - Python 3.9
            port.before, port.counted = frames, counted

    def move(self) -> None:
        """Empty the rings; above the file's limit they fill up, and the kernel counts its drops."""
        for index, port in enumerate(self.ports):
            if self.out.tell() < self.limit and not self.is_over:
                port.move(index, self.out)

    def stop(self) -> list[dict[str, Any]]:
        """Read the counters once more, and write the frames from before that."""
        results = [
            {
                "name": port.name,
                "before": port.before,
                "captured": frames - port.before,
                "received": counted[0] - port.counted[0],
                "sent": counted[1] - port.counted[1],
                "drops": port.drops,
            }
            for port, (frames, counted) in zip(self.ports, self._at_rest())  # noqa: B905 - Python 3.9
        ]
        # The kernel finishes a partly filled block after its timeout.
        end = time.monotonic() + 4 * _RETIRE_MS / 1000
        while time.monotonic() < end:
            time.sleep(_RETIRE_MS / 4000)
            self.move()
        # The taps still exist, but the file is final, because the controller is about to read it.
        self.is_over = True
        return results

    def _at_rest(self) -> list[tuple[int, tuple[int, int]]]:
        """Return each port's frames seen, and its own counters of packets received and sent.

        They are read until two readings agree, or until a deadline.
        """
        end = time.monotonic() + _PATIENCE_S
        before: list[tuple[int, tuple[int, int]]] = []
        while True:
            now = [(port.count(), netns.port_packets(port.link, port.netdev)) for port in self.ports]
            if now == before or time.monotonic() > end:
                return now
            before = now
            # The kernel counts an RNIC's sent packets when the device is done, a moment after the tap saw them.
            time.sleep(_QUIET_S)
            self.move()

    def close(self) -> None:
        """Remove all taps and the file."""
        for port in self.ports:
            port.close()
        self.out.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


def epoch_offset_ns() -> int:
    """Return the difference of wall clock and monotonic clock; the kernel stamps frames by the wall clock."""
    return time.time_ns() - time.monotonic_ns()


class Server:
    """A server of at most one capture. When the controller is gone, it removes the capture and its file."""

    def __init__(self) -> None:
        self.capture: Capture | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out a request, and return the answer."""
        do = request.get("do")
        if do == "clock":
            return {"event": "clock", "monotonic_ns": time.monotonic_ns()}
        if do == "start" and self.capture is None:
            self.capture = Capture(request)
            return {"event": "started", "epoch_offset_ns": epoch_offset_ns()}
        if do == "stop" and self.capture is not None:
            ports = self.capture.stop()
            return {
                "event": "stopped",
                "ports": ports,
                "bytes": self.capture.out.tell(),
                "epoch_offset_ns": epoch_offset_ns(),
            }
        state = "no capture is running" if self.capture is None else "a capture exists already"
        return {"event": "error", "error": f"request {do} is not possible: {state}"}


def main() -> int:
    """Serve until the end of stdin."""
    server, pending = Server(), b""
    try:
        while True:
            rings = [port.socket.fileno() for port in server.capture.ports] if server.capture else []
            readable, _, _ = select.select([0, *rings], [], [], 1.0)
            if server.capture is not None:
                server.capture.move()
            if 0 not in readable:
                continue
            chunk = os.read(0, 65536)
            if not chunk:
                return 0
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                try:
                    answer = server.answer(json.loads(line))
                except (OSError, ValueError, KeyError, TypeError) as error:
                    answer = {"event": "error", "error": f"{error}"}
                os.write(1, json.dumps(answer).encode() + b"\n")
    finally:
        if server.capture is not None:
            server.capture.close()


if __name__ == "__main__":
    sys.exit(main())
