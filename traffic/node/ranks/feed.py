"""A rank's storage traffic: prefetch the data of the next iteration, and write checkpoints.

Checkpoint modes:

- `sync`: all ranks at the same iteration. Each rank waits until its checkpoint is stored.
- `staggered`: each rank at its own iteration. It waits, too.
- `async`: all ranks at the same iteration. A rank continues at once. It waits only if its previous checkpoint is not
  stored yet, and at the end of the job for its last one.

The receiver verifies every byte (CRC-32).

A checkpoint holds the rank's state (`faultbed.traffic.node.ranks.rank_state`), followed by filler up to the configured
size. In every mode all ranks store the state after the same iterations. A staggered rank writes at its own turn what
it had copied at the common iteration before.
"""

from __future__ import annotations

import time

from faultbed.traffic.node.front_end.storage_client import StorageClient
from faultbed.traffic.node.storage import BLOCK_BYTES, blocks

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    import selectors
    from collections.abc import Callable
    from typing import Any

__all__ = ["Feed"]


class Feed:
    """The storage traffic of one rank.

    `spec` is `faultbed.traffic.workloads.storage_service.Storage` as plain data, with `address`, `port`, `ranks` and
    `generation`. `state()` returns a copy of the rank's state. `ingest_ns` is how long the rank has waited for the data
    of this iteration, `checkpoint_ns` how long for its checkpoint. `read_ns` is when the read of that data began and
    ended (node's clock), most of it during the iteration before. `stored(fields)` is called for every stored
    checkpoint: after which iteration it was written, the iterations that it holds, start_ns, end_ns and waited_ns,
    which includes the wait for it in `settle`.
    """

    def __init__(
        self,
        rank: int,
        spec: dict[str, Any],
        selector: selectors.BaseSelector,
        *,
        state: Callable[[], bytes],
        stored: Callable[[dict[str, int]], None],
        on_error: Callable[[str], None],
    ) -> None:
        self.rank, self.spec, self.state, self.stored = rank, spec, state, stored
        self._copied: tuple[int, bytes] = (0, b"")
        self.ingest_ns = self.checkpoint_ns = 0
        self.read_ns = (0, 0)
        self._clients: list[StorageClient] = []
        self._reader = self._client(selector, on_error) if spec["ingest_bytes"] else None
        self._writer = self._client(selector, on_error) if spec["checkpoint_bytes"] else None
        self._on_batch: Callable[[], None] | None = None
        self._batch_wanted_ns = self._read_begun_ns = self._read_ended_ns = 0
        self._on_writer_idle: Callable[[], None] | None = None
        self._on_idle: Callable[[], None] | None = None
        self._settling_ns = 0

    def _client(self, selector: selectors.BaseSelector, on_error: Callable[[str], None]) -> StorageClient:
        self._clients.append(StorageClient(self.spec["address"], self.spec["port"], selector, on_error))
        return self._clients[-1]

    def restore(self, checkpoint: dict[str, int], on_data: Callable[[bytes], None]) -> None:
        """Fetch a checkpoint (`rank`, `generation`, `iterations`), and call `on_data` with its verified data.

        Raises:
            ValueError: the job stores no checkpoints.
        """
        if self._writer is None:
            raise ValueError("this job stores no checkpoints, so there is none to restore")
        self._writer.restore(checkpoint, on_data)

    def begin(self, iterations: int = 0) -> None:
        """Fetch the data of the first iteration to run; `iterations` are already finished."""
        self._copied = (iterations, self.state())
        self._read()

    def batch(self, on_data: Callable[[], None]) -> None:
        """Call `on_data` when the data of this iteration has arrived, and start to fetch the data of the next one."""
        self.ingest_ns = self.checkpoint_ns = 0
        if self._reader is None:
            on_data()
            return
        self._on_batch, self._batch_wanted_ns = on_data, time.monotonic_ns()
        if not self._reader.is_busy:
            self._hand_over()

    def _read(self) -> None:
        if self._reader is not None:
            self._read_begun_ns = time.monotonic_ns()
            self._reader.get(self.spec["ingest_bytes"], self._on_read)

    def _on_read(self) -> None:
        self._read_ended_ns = time.monotonic_ns()
        if self._on_batch is not None:
            self._hand_over()

    def _hand_over(self) -> None:
        """Start to read the data of the next iteration, and call the callback of `batch`."""
        on_data, self._on_batch = self._on_batch, None
        assert on_data is not None  # noqa: S101  # both callers have one
        self.ingest_ns = time.monotonic_ns() - self._batch_wanted_ns
        self.read_ns = (self._read_begun_ns, self._read_ended_ns)
        self._read()
        on_data()

    def _is_due(self, iteration: int) -> bool:
        every = self.spec["every"]
        turn = self.rank * every // self.spec["ranks"] if self.spec["mode"] == "staggered" else 0
        return bool((iteration + 1 + turn) % every == 0)

    def checkpoint(self, iteration: int, on_done: Callable[[], None]) -> None:
        """Write a checkpoint if one is due. Call `on_done` when the rank may continue."""
        if self._writer is not None and (iteration + 1) % self.spec["every"] == 0:
            self._copied = (iteration + 1, self.state())
        if self._writer is None or not self._is_due(iteration):
            on_done()
            return
        requested_ns = time.monotonic_ns()
        if self._writer.is_busy:  # the previous checkpoint is not stored yet
            self._on_writer_idle = lambda: self._put(iteration, requested_ns, on_done)
        else:
            self._put(iteration, requested_ns, on_done)

    def _put(self, iteration: int, requested_ns: int, on_done: Callable[[], None]) -> None:
        start_ns, waits = time.monotonic_ns(), self.spec["mode"] != "async"
        self.checkpoint_ns = start_ns - requested_ns
        iterations, state = self._copied

        def stored() -> None:
            end_ns = time.monotonic_ns()
            if waits:
                self.checkpoint_ns = end_ns - requested_ns
            waited_ns = (end_ns if waits else start_ns) - requested_ns
            if self._on_idle is not None:
                waited_ns += end_ns - self._settling_ns
            self.stored(
                {
                    "iteration": iteration,
                    "iterations": iterations,
                    "start_ns": start_ns,
                    "end_ns": end_ns,
                    "waited_ns": waited_ns,
                }
            )
            following, self._on_writer_idle = self._on_writer_idle, None
            if waits:
                on_done()
            elif following is not None:
                following()
            elif self._on_idle is not None:
                self._on_idle()

        # Every checkpoint has its own content, as those of a real job do.
        size = self.spec["checkpoint_bytes"]
        block = f"rank {self.rank} iteration {iterations} ".encode().ljust(64, b".") * (BLOCK_BYTES // 64)
        parts = [memoryview(state)[:size], *blocks(block, max(0, size - len(state)))]
        header = {"rank": self.rank, "iterations": iterations}
        header |= {"ranks": self.spec["ranks"], "generation": self.spec["generation"]}
        assert self._writer is not None  # noqa: S101  # `checkpoint` returns early without a writer
        self._writer.put([part for part in parts if part], stored, header)
        if not waits:
            on_done()

    def settle(self, on_done: Callable[[], None]) -> None:
        """Call `on_done` when no write is in progress."""
        if self._writer is not None and self._writer.is_busy:
            self._on_idle, self._settling_ns = on_done, time.monotonic_ns()
        else:
            on_done()

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            client.close()
