"""A frame of `faultbed top`, from what the lab's machines have reported so far.

    screen = Screen(began_ns=time.monotonic_ns())
    telemetry.start(lab, on_sample=screen.sample, on_change=screen.change)      # on the watchers' threads
    screen.table(height, now_ns=time.monotonic_ns(), heard_ns=following.heard_ns())

A machine that has been silent for `SILENT_NS` is named: otherwise its ports would look like ports that carry nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.table import Table
from rich.text import Text

from faultbed.harness.cli.context import styled
from faultbed.harness.quantities import format_rate
from faultbed.testbed.observe import counters, telemetry

__all__ = ["REPORT_MS", "SILENT_NS", "Screen"]

REPORT_MS = 2000
SILENT_NS = 10_000_000_000
"""Time without a sample after which a machine is silent. Samples come every `REPORT_MS`, under emulation every 4 s."""
_STALE_NS = 6_000_000_000
"""A port without changes for this long carries nothing; an emulated machine sends a sample every 4 s."""
_RECENT = 8
"""Number of latest changes that are shown."""
_LEAST = 4
"""Minimum number of rows for ports, and for error counters."""
_FRAME = 8
"""Rows for the title, the header and silent machines."""
_RNIC_ERRORS = ("out_of_seq_request", "rcvd_seq_err", "retry_exceeded_err", "rcvd_rnr_err")
_ERRORS = (
    *_RNIC_ERRORS,
    *(counters.MLX5[name] for name in _RNIC_ERRORS),
    "duplicate_request",
    "send_err",
    "queue_drops",
    "rx_dropped",
)
"""Error counters, most important first, by the names of rdma_rxe and of mlx5."""


@dataclass(kw_only=True)
class Screen:
    """What the lab's machines have reported. The watchers' threads fill it, `table` draws it.

    Times of changes count from `began_ns` (controller's clock). `first` and `last` are by (node, counter): the first
    value, and the latest value with its time in ns.
    """

    began_ns: int
    last: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    rates: dict[tuple[str, str], float] = field(default_factory=dict)  # bytes a second
    first: dict[tuple[str, str], int] = field(default_factory=dict)
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=_RECENT))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def sample(self, reading: telemetry.Sample) -> None:
        """Record the counters of a node."""
        with self.lock:
            for name, value in reading.values.items():
                key = (reading.node, name)
                at_ns, before = self.last.get(key, (reading.at_ns, value))
                if name.endswith("x_bytes") and reading.at_ns > at_ns:  # rx and tx; bytes in a queue have no rate
                    self.rates[key] = counters.delta(before, value) * 1e9 / (reading.at_ns - at_ns)
                self.last[key] = (reading.at_ns, value)
                self.first.setdefault(key, value)

    def change(self, event: telemetry.Change) -> None:
        """Record a change that a kernel has reported."""
        with self.lock:
            at_s = (event.at_ns - self.began_ns) / 1e9
            self.recent.appendleft(f"{at_s:7.2f} s  {event.node}: {event.subject} {event.text or 'is gone'}")

    def table(self, rows: int, *, now_ns: int, heard_ns: Mapping[str, int]) -> Table:
        """Return a frame for a terminal with `rows` rows.

        It shows silent machines, ports by their rate, error counters that have grown, and the latest changes.
        """
        table = Table(box=None, pad_edge=False, header_style="bold", title="Ctrl-C to stop", title_justify="left")
        table.add_column("node", no_wrap=True)
        table.add_column("what")  # in a narrow terminal its cells are cut
        table.add_column("now", no_wrap=True)
        for machine, at_ns in sorted(heard_ns.items()):
            if now_ns - at_ns > SILENT_NS:
                message = _cut(f"no telemetry for {(now_ns - at_ns) / 1e9:.0f} s", "red")
                table.add_row(machine, message, styled("silent", "red"))
        with self.lock:
            most = max(_LEAST, rows - _RECENT - _FRAME)
            live = {
                key: rate
                for key, rate in self.rates.items()
                if now_ns - self.last[key][0] < _STALE_NS and not key[1].startswith(("lo.", "mgmt"))
            }
            for (node, name), rate in sorted(live.items(), key=lambda item: -item[1])[:most]:
                table.add_row(node, _cut(name.removesuffix("_bytes")), format_rate(rate))
            errors = self._grown_errors()
            shown = max(_LEAST, most // 2)
            for node, name, moved in errors[:shown]:
                table.add_row(node, _cut(name), styled(f"+{moved:,}", "yellow"))
            if len(errors) > shown:
                table.add_row("", _cut(f"and {len(errors) - shown} more error counters"), "")
            for line in self.recent:
                table.add_row("", _cut(line, "dim"), "")
        return table

    def _grown_errors(self) -> list[tuple[str, str, int]]:
        """Return the error counters that have grown since the start, the largest growth first."""
        grown = [
            (node, name, moved)
            for (node, name), (_, value) in self.last.items()
            if name.rpartition(".")[2] in _ERRORS and (moved := counters.delta(self.first[node, name], value))
        ]
        return sorted(grown, key=lambda row: (-row[2], row[0], row[1]))


def _cut(text: str, style: str = "") -> Text:
    """Return a cell of one line. It ends with an ellipsis if the terminal is too narrow."""
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")
