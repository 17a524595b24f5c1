"""Part `packets` of the bench: speed of reading and checking a synthetic capture of a million packets.

tshark reads the same file for comparison. The capture contains what costs time: several interleaved flows, an ACK for
every 16 packets, and losses with their NAKs and go-back-N repairs. It is a pcapng file with 128 bytes of each packet,
like captures of the lab.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench.rows import Row, mark
from faultbed.harness.packets.analysis import Analysis, analyse
from faultbed.testbed.errors import LabError
from faultbed.testbed.packets.bth import ACKNOWLEDGE, NAK_SEQUENCE, PSN_SPACE
from faultbed.testbed.packets.capture_file import read
from faultbed.testbed.packets.frames import Frames
from faultbed.testbed.packets.link_types import ETHERNET
from faultbed.testbed.packets.pcapng_writer import write_pcapng

__all__ = ["measure", "synthetic_capture"]

PACKETS, FLOWS, LOSS, REPEATS, SNAP = 1_000_000, 8, 0.001, 3, 128
_WINDOW, _ACK_EVERY = 64, 16
_FIELDS = (
    "frame.time_epoch",
    "ip.src",
    "ip.dst",
    "infiniband.bth.opcode",
    "infiniband.bth.destqp",
    "infiniband.bth.psn",
)
_WRITE_MIDDLE, _HEADERS = 0x07, 14 + 20 + 8 + 12


def synthetic_capture(packets: int, *, flows: int = FLOWS, loss: float = LOSS, seed: int = 7) -> tuple[Frames, int]:
    """Return a synthetic capture at a receiver's port that breaks no rule, and the number of packets lost before it."""
    rng = np.random.default_rng(seed)
    parts = [_flow(packets // flows, loss, rng) for _ in range(flows)]
    lost = sum(part[3] for part in parts)
    count = sum(len(part[0]) for part in parts)
    time_ns = np.concatenate([part[2] for part in parts])
    order = np.argsort(time_ns, kind="stable")
    flow = np.concatenate([np.full(len(part[0]), index) for index, part in enumerate(parts)])[order]
    psn = np.concatenate([part[0] for part in parts])[order]
    syndrome = np.concatenate([part[1] for part in parts])[order]
    rows = np.zeros((count, SNAP), dtype=np.uint8)
    is_answer = syndrome >= 0
    payload = np.where(is_answer, 4, 1024)
    _write(rows, 12, np.full(count, 0x0800), 2)
    rows[:, 14], rows[:, 22], rows[:, 23] = 0x45, 64, 17
    _write(rows, 16, 20 + 8 + 12 + payload + 4, 2)
    _write(rows, 26, np.where(is_answer, 0x0A4D0205, 0x0A4D0101), 4)
    _write(rows, 30, np.where(is_answer, 0x0A4D0101, 0x0A4D0205), 4)
    _write(rows, 34, 0xC000 + flow, 2)
    _write(rows, 36, np.full(count, 4791), 2)
    _write(rows, 38, 8 + 12 + payload + 4, 2)
    rows[:, 42] = np.where(is_answer, ACKNOWLEDGE, _WRITE_MIDDLE)
    _write(rows, 47, np.where(is_answer, 0x100, 0x200) + flow, 3)
    _write(rows, 51, psn % PSN_SPACE, 3)
    rows[:, 54] = np.where(is_answer, np.maximum(syndrome, 0), 0)
    length = _HEADERS + payload + 4
    frames = Frames(
        data=np.concatenate([rows.ravel(), np.zeros(SNAP, dtype=np.uint8)]),
        start=np.arange(count, dtype=np.int64) * SNAP,
        captured=np.minimum(length, SNAP),
        length=length,
        time_ns=time_ns[order] + 1_700_000_000_000_000_000,
        interface=np.zeros(count, dtype=np.int16),
        outbound=np.where(is_answer, 0, 1).astype(np.int8),
        interfaces=("rtsw2:host4:rxe0",),
        link_types=np.array([ETHERNET], dtype=np.int64),
    )
    return frames, lost


def _write(rows: np.ndarray, at: int, value: np.ndarray, size: int) -> None:
    """Write a big-endian number of `size` bytes at offset `at` of each row."""
    for index in range(size):
        rows[:, at + index] = value >> 8 * (size - 1 - index) & 0xFF


def _flow(count: int, loss: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Return PSNs, AETH syndromes (-1: a request), times in ns and number of losses of a flow with go-back-N."""
    first = int(rng.integers(PSN_SPACE))
    psns: list[np.ndarray] = []
    syndromes: list[np.ndarray] = []
    sent = base = top = 0
    losses: list[bool] = []
    while sent < count:
        length = min(int(rng.geometric(loss)), count - sent)
        run = base + np.arange(length)
        psns.append(first + np.repeat(run, np.where(run % _ACK_EVERY == 0, 2, 1)))
        is_ack = np.concatenate([[False], np.diff(psns[-1]) == 0])
        syndromes.append(np.where(is_ack, 0, -1))
        base += length
        ahead = int(rng.integers(1, _WINDOW))
        # `base` is lost. The packets after it are out of order and dropped; only the first one causes a NAK.
        psns.append(first + np.concatenate([[base + 1, base], base + 2 + np.arange(ahead)]))
        syndromes.append(np.concatenate([[-1, NAK_SEQUENCE], np.full(ahead, -1)]))
        sent += length + ahead + 1
        # A packet that passed out of order before is not missing if its retransmission is lost.
        losses.append(base >= top)
        top = max(top, base + 2 + ahead)
    psn, syndrome = np.concatenate(psns), np.concatenate(syndromes)
    # The last loss is not repaired: exclude it.
    tail = len(psns[-1])
    psn, syndrome = psn[:-tail], syndrome[:-tail]
    return psn, syndrome, np.cumsum(rng.integers(500, 1500, size=len(psn))), sum(losses[:-1])


def measure() -> Iterator[Row]:
    """Yield the rows of `python -m bench packets`.

    Raises:
        LabError: the checker did not find the losses in the capture, so its speed means nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.pcapng"
        frames, lost = synthetic_capture(PACKETS)
        write_pcapng(path, frames)
        count = len(frames)
        rates, seconds = [], []
        for _ in range(REPEATS):
            begin = time.process_time(), time.perf_counter()
            analysis = analyse(read(path))
            # The larger of both, so that a second thread would not look like a faster core.
            seconds.append(max(time.process_time() - begin[0], time.perf_counter() - begin[1]))
            rates.append(count / seconds[-1])
        _check_result(analysis, lost)
        middle = statistics.median(rates)
        yield (
            f"captured packets read, decoded and checked ({count:,} packets, {path.stat().st_size >> 20} MiB)",
            f"{middle:,.0f} /s",
            f"{min(rates):,.0f}..{max(rates):,.0f} /s, n={REPEATS}",
            ">= 300,000 /s",
            mark(reached=middle >= 300_000),  # noqa: PLR2004 (the goal)
        )
        yield _against_tshark(path, statistics.median(seconds))


def _check_result(analysis: Analysis, lost: int) -> None:
    counts = sum(flow.missing for flow in analysis.flows), sum(len(flow.broken) for flow in analysis.flows)
    if counts != (lost, 0):
        raise LabError(f"bench: the capture has {lost} lost packets and no broken rule, but the checker found {counts}")


def _against_tshark(path: Path, ours_s: float) -> Row:
    title = "same capture: tshark's time for six fields of each packet / faultbed's time for all checks"
    if shutil.which("tshark") is None:
        return title, "not measured", "no tshark here", ">= 5", ""
    argv = ["tshark", "-n", "-r", str(path), "-T", "fields", *(word for name in _FIELDS for word in ("-e", name))]
    begin = time.perf_counter()
    subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    ratio = (time.perf_counter() - begin) / ours_s
    return (
        title,
        f"{ratio:.1f}",
        "n=1",
        ">= 5",
        mark(reached=ratio >= 5),  # noqa: PLR2004 (the goal)
    )
