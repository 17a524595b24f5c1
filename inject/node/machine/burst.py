"""Checkpoint bursts of another job to a job's storage: TCP on the front end, several writers at the same time.

The writers speak the storage's protocol (a line with size and CRC-32, then the bytes). A checkpoint counts once the
storage has verified and answered it. A child of the holder writes, and ends with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
import zlib
from typing import Any

from faultbed.inject.node.actuator import Actuator, Refused
from faultbed.inject.node.child import Child
from faultbed.inject.node.machine.process import processes_with

__all__ = ["BurstActuator", "listening"]

_BLOCK = bytes(65536)
_LISTEN = "0A"
_ANSWER_S = 60.0


class BurstActuator(Actuator):
    """`writers` write `size_bytes` each to the server `argument` of this host, all at the start of every `period_s`."""

    poll_s = 0.05

    def __init__(self, *, argument: str, writers: int, size_bytes: int, period_s: float) -> None:
        self._argument, self._writers = argument, writers
        self._size_bytes, self._period_s = size_bytes, period_s
        self._server: tuple[str, int] | None = None
        self._child = Child()
        self._counting = threading.Lock()

    def prepare(self) -> dict[str, Any]:
        """Refuse a host on which no such server listens."""
        servers = [address for pid in processes_with(self._argument) for address in listening(pid)]
        if not servers:
            raise Refused(f"no {self._argument} listens here; target the host of the job's storage, while the job runs")
        self._server = servers[0]
        return self.read()

    def revert_script(self) -> str:
        return "true"

    def on(self) -> None:
        self._child.start(self._write_all)

    def off(self) -> None:
        """Kill the writers at any point; the server discards incomplete checkpoints."""
        self._child.stop()

    def read(self) -> dict[str, Any]:
        """Report whether the writers run, and how many checkpoints the server has stored."""
        return {
            "applied": self._child.is_running(),
            "what": self._argument,
            "server": "{}:{}".format(*self._server) if self._server else None,
            "stored": self._child.count,
        }

    def hits(self) -> int:
        """Return the number of checkpoints that the server has stored."""
        return self._child.count

    # In the child.

    def _write_all(self) -> None:
        # The holder's scheduling class makes edges punctual; this load competes like a normal process.
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        crc = zlib.crc32(b"")
        for length in self._lengths():
            crc = zlib.crc32(_BLOCK[:length], crc)
        head = json.dumps({"put": self._size_bytes, "crc": crc}).encode() + b"\n"
        began_s = time.monotonic()
        threads = [
            threading.Thread(target=self._write, args=(head, began_s), daemon=True) for _ in range(self._writers)
        ]
        for thread in threads:
            thread.start()
        while self._child.is_wanted() and any(thread.is_alive() for thread in threads):
            threads[0].join(0.2)

    def _write(self, head: bytes, began_s: float) -> None:
        """Write until the server ends."""
        if self._server is None:
            return
        with (
            contextlib.suppress(OSError),
            socket.create_connection(self._server, timeout=_ANSWER_S) as server,
            server.makefile("rb") as answers,
        ):
            while True:
                server.sendall(head)
                for length in self._lengths():
                    server.sendall(_BLOCK[:length])
                if "stored" not in json.loads(answers.readline() or b"{}"):
                    return
                with self._counting:
                    self._child.add()
                # All writers start together at the next multiple of the period.
                time.sleep(self._period_s - (time.monotonic() - began_s) % self._period_s)

    def _lengths(self) -> list[int]:
        whole, rest = divmod(self._size_bytes, len(_BLOCK))
        return [len(_BLOCK)] * whole + ([rest] if rest else [])


def listening(pid: int) -> list[tuple[str, int]]:
    """Return address and port of every IPv4 TCP socket on which a process listens (proc_net_tcp(5))."""
    inodes = set()
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - start-up time
            with contextlib.suppress(OSError):
                kind, _, inode = os.readlink(f"/proc/{pid}/fd/{fd}").partition(":")  # noqa: PTH115
                if kind == "socket":
                    inodes.add(inode.strip("[]"))
        with open(f"/proc/{pid}/net/tcp", encoding="ascii") as file:  # noqa: PTH123
            lines = [line.split() for line in file][1:]
    except OSError:
        return []
    addresses = []
    for words in lines:
        if words[3] == _LISTEN and words[9] in inodes:
            address, port = words[1].split(":")
            # The address is a number in this machine's byte order.
            addresses.append((socket.inet_ntoa(struct.pack("=I", int(address, 16))), int(port, 16)))
    return addresses
