"""The part `capture`: it captures at switch ports in every pass, and keeps the packets of the measured one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from faultbed.harness.packets import evidence
from faultbed.harness.packets.evidence import Evidence
from faultbed.harness.parts.part import Part
from faultbed.harness.parts.passes import Active, Ended, Pass
from faultbed.harness.record.evidence.packet_summary import PacketSummary
from faultbed.testbed.observe import packet_capture
from faultbed.testbed.observe.packet_capture import Captured, Capturing
from faultbed.testbed.packets.cnp_rule import CnpRule

__all__ = ["PART", "summary_of"]


class _Ports(Active):
    def __init__(self, capturing: Capturing, cnp: CnpRule | None, progress: Callable[[str], object]) -> None:
        self._capturing, self._cnp, self._progress = capturing, cnp, progress
        self._captured: Captured | None = None

    def end(self) -> None:
        self._progress("fetching the captured packets")
        self._captured = self._capturing.stop()

    def sealed(self, ended: Ended) -> PacketSummary | None:
        if self._captured is None or ended.phase == "twin":
            return None
        packets = evidence.keep(self._captured, ended.run_dir.path, ended.windows, self._cnp)
        ended.run_dir.write_packets(packets)
        return summary_of(packets)


@contextlib.contextmanager
def _around(run: Pass) -> Iterator[Active | None]:
    """Capture the experiment's ports while the block lasts.

    Raises:
        UsageError: there is no such port, or its switch does not forward in its kernel.
        LabError: a machine could not capture.
    """
    if not run.experiment.capture:
        yield None
        return
    run.progress(f"capturing at {', '.join(run.experiment.capture)}")
    with packet_capture.start(run.lab, run.experiment.capture) as capturing:
        yield _Ports(capturing, run.experiment.cnp, run.progress)


def summary_of(packets: Evidence) -> PacketSummary:
    """Return the summary of captured packets that metrics need. Times are the controller's."""
    backs = sorted(
        (
            (episode.signal_ns or episode.resent_ns) - packets.epoch_offset_ns,
            episode.resent_ns - packets.epoch_offset_ns,
        )
        for flow in packets.analysis.flows
        for episode in flow.episodes
    )
    return PacketSummary(
        frames=packets.analysis.frames,
        missed=packets.missed,
        extra=packets.extra,
        broken=packets.analysis.violations,
        goings_back=tuple(backs),
        doubts=packets.analysis.doubts,
        cnp=packets.analysis.cnp,
    )


PART = Part(name="capture", evidence=PacketSummary, around=_around)
