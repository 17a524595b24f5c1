"""Checkpoints of somebody else, written to the storage of a job: TCP on the front end, several writers at one moment.

They speak the storage's own protocol (a line that says how much comes and its CRC-32, then the bytes), so that each
checkpoint that counts is one that the storage has checked and answered. A child of the holder writes; it ends with it.
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

from inject.node.actuator import Refused
from inject.node.child import Child
from inject.node.machine.process import processes_with

__all__ = ["BurstActuator", "listening"]

_BLOCK = bytes(65536)
_LISTEN = "0A"
_ANSWER_S = 60.0


class BurstActuator:
    """`writers` write `size_bytes` each to the server `argument` of this host, all at once in every `period_s`."""

    poll_s = 0.05

    def __init__(self, *, argument: str, writers: int, size_bytes: int, period_s: float) -> None:
        self._argument, self._writers = argument, writers
        self._size_bytes, self._period_s = size_bytes, period_s
        self._server: tuple[str, int] | None = None
        self._child = Child()
        self._counting = threading.Lock()

    def prepare(self) -> dict[str, Any]:
        """Refuse a host on which no such server listens."""
        found = [where for pid in processes_with(self._argument) for where in listening(pid)]
        if not found:
            raise Refused(f"no {self._argument} listens here: does the job have its storage on this host?")
        self._server = found[0]
        return self.read()

    def revert_script(self) -> str:
        """Nothing: the child ends with the holder, by itself and with the unit."""
        return "true"

    def on(self) -> None:
        """Begin to write."""
        self._child.start(self._write_all)

    def off(self) -> None:
        """End in the middle, as a job that is ended does: the server forgets what is not whole."""
        self._child.stop()

    def read(self) -> dict[str, Any]:
        """Whether the writers are there, and how many checkpoints the server has taken."""
        return {
            "applied": self._child.is_there(),
            "what": self._argument,
            "server": "{}:{}".format(*self._server) if self._server else None,
            "stored": self._child.count,
        }

    def hits(self) -> int:
        """Checkpoints that the server has taken."""
        return self._child.count

    def close(self) -> None:
        """Nothing is held open."""

    # In the child.

    def _write_all(self) -> None:
        # The holder's class is for edges on time: load has to compete like any other process.
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
        while self._child.wanted() and any(thread.is_alive() for thread in threads):
            threads[0].join(0.2)

    def _write(self, head: bytes, began_s: float) -> None:
        """Ends when the server does: there is nothing left to write to."""
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
                # Together again at the next beat, however long this one took.
                time.sleep(self._period_s - (time.monotonic() - began_s) % self._period_s)

    def _lengths(self) -> list[int]:
        whole, rest = divmod(self._size_bytes, len(_BLOCK))
        return [len(_BLOCK)] * whole + ([rest] if rest else [])


def listening(pid: int) -> list[tuple[str, int]]:
    """Address and port of every TCP socket (IPv4) on which a process listens: /proc/net/tcp, proc_net_tcp(5)."""
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
    found = []
    for words in lines:
        if words[3] == _LISTEN and words[9] in inodes:
            address, port = words[1].split(":")
            # The address is a number of this machine's byte order.
            found.append((socket.inet_ntoa(struct.pack("=I", int(address, 16))), int(port, 16)))
    return found
