"""The part `capture`: it captures at switch ports in every pass, and keeps the packets of the measured one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from faultbed.harness.experiment.declare.lab_names import LabNames
from faultbed.harness.experiment.experiment_file import Experiment
from faultbed.harness.packets import evidence
from faultbed.harness.packets.evidence import Evidence
from faultbed.harness.parts.capture.packet_metrics import goings_back, packet_metrics
from faultbed.harness.parts.capture.packet_summary import PacketSummary
from faultbed.harness.parts.part import Part
from faultbed.harness.parts.passes import Active, Pass
from faultbed.testbed.observe import packet_capture
from faultbed.testbed.observe.packet_capture import Captured, Capturing

__all__ = ["PART", "summary_of"]


class _Ports(Active):
    def __init__(self, run: Pass) -> None:
        self._run, self._setting = run, run.setting
        self._capturing: Capturing | None = None
        self._captured: Captured | None = None

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        ports = self._setting.experiment.capture
        self._run.progress(f"capturing at {', '.join(ports)}")
        with packet_capture.start(self._setting.lab, ports) as self._capturing:
            yield

    def end(self) -> None:
        self._run.progress("fetching the captured packets")
        self._captured = self._capturing.stop() if self._capturing is not None else None

    def sealed(self) -> PacketSummary | None:
        if self._captured is None or self._run.phase != "measured":
            return None
        run_dir, cnp = self._setting.run_dir, self._setting.experiment.cnp
        packets = evidence.keep(self._captured, run_dir.path, self._run.injected.windows, cnp)
        run_dir.write_packets(packets)
        return summary_of(packets)


def _active(run: Pass) -> Active | None:
    return _Ports(run) if run.setting.experiment.capture else None


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


def _bind(names: LabNames, experiment: Experiment, _endpoints: Sequence[str]) -> Experiment:
    """Return the experiment with the full names of the captured ports, without duplicates."""
    ports = []
    for index, text in enumerate(experiment.capture):
        path = f"capture.ports[{index}]"
        for port in names.select(path, text):
            with names.at(path):
                ports.append(packet_capture.port_named(names.topology, port)[0])
    return replace(experiment, capture=tuple(dict.fromkeys(ports)))


def _says(experiment: Experiment) -> Iterator[str]:
    if experiment.capture:
        yield f"packets are captured at {', '.join(experiment.capture)}"


PART = Part(
    name="capture",
    evidence=PacketSummary,
    bind=_bind,
    says=_says,
    active=_active,
    metrics=packet_metrics,
    goings_back=goings_back,
)
