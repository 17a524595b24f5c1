"""Read from a storage host beside a job; JSON lines on its channel.

    python3 -m faultbed.traffic.node.front_end.storage_reader

Requests                                                          replies
    {"do": "clock"}                                               clock {monotonic_ns, pid}
    {"do": "read", address, port, size_bytes, every_ns}
    {"do": "end"}                                                 reads {rows, error}, when the planned reads are over
    {"do": "quit"}                                                (end of stdout)

A read of `size_bytes` is planned every `every_ns`, whether or not the reads before it are over (an open loop), until
`end`. It begins on a connection that is free; if all `CONNECTIONS` are busy it waits, and its time still counts from
when it was planned. A slow read therefore does not hide the delay of later ones (coordinated omission, G. Tene, "How
NOT to Measure Latency").

`rows` holds [planned, begin, end] of each read. The first `error` ends the reading. The rows are sent at the end,
because each write would take CPU time of an emulated host. The end of stdin means that the controller is gone.
"""

from __future__ import annotations

import collections
import json
import os
import selectors
import sys
import time

from faultbed.traffic.node.front_end.storage_client import StorageClient
from faultbed.traffic.node.ready_files import handle_ready

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from typing import Any

__all__ = ["CONNECTIONS", "Reader", "main"]

CONNECTIONS = 4


class Reader:
    """The event loop of a reader."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.buffer = b""
        self.open = True
        self.spec: dict[str, Any] = {}
        self.clients: list[StorageClient] = []
        self.due_ns: int | None = None
        self.planned: collections.deque[int] = collections.deque()
        self.rows: list[tuple[int, int, int]] = []
        self.error: str | None = None
        self.is_ending = False

    def run(self) -> None:
        """Serve until the controller requests the end or is gone."""
        self.selector.register(0, selectors.EVENT_READ, self._readable)
        while self.open:
            self._plan(time.monotonic_ns())
            if self.is_ending and not self.planned and not any(client.is_busy for client in self.clients):
                self.is_ending = False
                _emit("reads", rows=self.rows, error=self.error)
            wait_s = None if self.due_ns is None else max(0, self.due_ns - time.monotonic_ns()) / 1e9
            handle_ready(self.selector, self.selector.select(wait_s))

    def _plan(self, now_ns: int) -> None:
        """Plan the reads that are due, and begin those for which there is a connection."""
        while self.due_ns is not None and self.due_ns <= now_ns:
            self.planned.append(self.due_ns)
            self.due_ns += self.spec["every_ns"]
        for client in self.clients:
            if self.planned and not client.is_busy:
                self._begin(client, self.planned.popleft())

    def _begin(self, client: StorageClient, planned_ns: int) -> None:
        begin_ns = time.monotonic_ns()
        client.get(self.spec["size_bytes"], lambda: self.rows.append((planned_ns, begin_ns, time.monotonic_ns())))

    def _fail(self, text: str) -> None:
        self.error = self.error or text
        self.due_ns = None
        self.planned.clear()
        for client in self.clients:
            client.close()
        self.clients = []

    def _readable(self) -> None:
        data = os.read(0, 1 << 16)
        if not data:
            self.open = False
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            getattr(self, f"do_{request['do']}")(request)

    def do_clock(self, request: dict[str, Any]) -> None:
        """Report the clock and the process id."""
        _emit("clock", monotonic_ns=time.monotonic_ns(), pid=os.getpid(), seq=request.get("seq"))

    def do_read(self, request: dict[str, Any]) -> None:
        """Connect to the storage and begin to read."""
        self.spec = request
        try:
            for _ in range(CONNECTIONS):
                self.clients.append(StorageClient(request["address"], request["port"], self.selector, self._fail))
        except OSError as error:
            self._fail(str(error))
        else:
            self.due_ns = time.monotonic_ns()

    def do_end(self, _request: dict[str, Any]) -> None:
        """Plan no further reads; report all of them when the last planned one is over."""
        self.due_ns, self.is_ending = None, True

    def do_quit(self, _request: dict[str, Any]) -> None:
        """End the loop."""
        self.open = False


def _emit(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def main() -> None:
    """Run the reader."""
    try:
        Reader().run()
    except BrokenPipeError:  # the controller closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
