"""Packet evidence that a run stores: the capture, a slice of it around each fault, and `packets.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from faultbed.harness.json_text import json_text
from faultbed.harness.packets.analysis import Analysis, analyse
from faultbed.testbed.observe.packet_capture import Captured, PortProof
from faultbed.testbed.packets.cnp_rule import CnpRule
from faultbed.testbed.packets.pcapng_writer import write_pcapng

__all__ = ["CAPTURE", "Evidence", "keep", "read", "with_idle_ports", "write"]

CAPTURE = "capture.pcapng"
_BEFORE_NS, _AFTER_NS = 500_000_000, 1_500_000_000
"""Margins of a slice before and after its fault. They cover the last healthy packets and the recovery."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `packets.json`.

    A packet's time minus `epoch_offset_ns` is on the controller's monotonic clock, like all times of a run. `slices`
    are files by fault id. `clock_error_ns` is the uncertainty of the capture's clock.
    """

    schema: Literal[1] = 1
    epoch_offset_ns: int
    clock_error_ns: int
    proofs: tuple[PortProof, ...]
    slices: dict[str, str]
    analysis: Analysis

    @property
    def missed(self) -> int:
        """Frames that the ports counted and the capture lacks, plus frames that the kernel dropped."""
        return sum(proof.missing + proof.drops for proof in self.proofs)

    @property
    def extra(self) -> int:
        """Frames that the capture has and the ports did not count; each of them may hide a missing frame."""
        return sum(proof.extra for proof in self.proofs)


def keep(
    captured: Captured, folder: Path, windows: Mapping[str, tuple[int, int]], cnp: CnpRule | None = None
) -> Evidence:
    """Write the capture and its slices into a run directory, and analyse it.

    Args:
        captured: the capture.
        folder: the run directory.
        windows: first firing and removal of each fault, controller monotonic ns.
        cnp: how receivers answer marked packets; None: not checked.
    """
    frames = captured.frames
    proofs = ", ".join(
        f"{proof.name}: {proof.captured} of {proof.counted}, {proof.drops} drops" for proof in captured.proofs
    )
    write_pcapng(folder / CAPTURE, frames, comment=f"captured of counted by the port: {proofs}")
    slices = {}
    for fault_id, (start_ns, end_ns) in windows.items():
        first, last = np.searchsorted(
            frames.time_ns,
            [start_ns - _BEFORE_NS + captured.epoch_offset_ns, end_ns + _AFTER_NS + captured.epoch_offset_ns],
        ).tolist()
        slices[fault_id] = f"capture-{fault_id}.pcapng"
        chosen = np.arange(first, last, dtype=np.int64)
        comment = f"around {fault_id}; frame 1 is frame {first + 1} of {CAPTURE}"
        write_pcapng(folder / slices[fault_id], frames, comment=comment, order=chosen)
    return Evidence(
        epoch_offset_ns=captured.epoch_offset_ns,
        clock_error_ns=captured.clock_error_ns,
        proofs=captured.proofs,
        slices=slices,
        analysis=with_idle_ports(analyse(frames, cnp=cnp)),
    )


def with_idle_ports(analysis: Analysis) -> Analysis:
    """Add a doubt for each port without requests: the experiment selected its ports, so silence proves nothing."""
    busy = {flow.port for flow in analysis.flows}
    idle = [port for port in analysis.ports if port not in busy] if busy else []
    doubts = [f"no request of a reliable connection passed {port}: nothing to check there" for port in idle]
    return msgspec.structs.replace(analysis, doubts=(*analysis.doubts, *doubts))


def write(evidence: Evidence) -> bytes:
    """Return the bytes of `packets.json`."""
    return json_text(evidence, indent=1)


def read(content: bytes) -> Evidence:
    """Read `packets.json`.

    Raises:
        msgspec.ValidationError: not evidence of schema 1.
    """
    return msgspec.json.decode(content, type=Evidence)
