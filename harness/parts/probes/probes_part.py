"""The part `probes`: it probes the paths between racks in every pass, and keeps the trips of the measured one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from faultbed.harness.experiment.experiment_file import Experiment
from faultbed.harness.parts.part import Part
from faultbed.harness.parts.passes import Active, Pass
from faultbed.testbed.observe.telemetry import Change
from faultbed.traffic.probes import prober
from faultbed.traffic.probes.prober import ProbeSpec, Probing
from faultbed.traffic.probes.results import ProbeTrips

__all__ = ["PART", "Probes", "ProbesEvidence"]


class ProbesEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """`evidence/measured/probes.json`; the trips are in `probes.parquet`.

    Attributes:
        trips: number of probes with a known path.
        unknown: number of probes whose path is unknown.
        trouble: why paths are unknown; None: they are known.
    """

    trips: int
    unknown: int
    trouble: str | None


class Probes(Active):
    """Probes that look up their paths again after each change of a route or a link.

    Their events do not renew the reservation of the lab. Otherwise a workload that hangs would keep the lab reserved
    for as long as its probes run.
    """

    def __init__(self, run: Pass, spec: ProbeSpec) -> None:
        self._run, self._spec = run, spec
        self._probing: Probing | None = None
        self._trips: ProbeTrips | None = None

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Probe the paths between racks while the block lasts.

        Raises:
            UsageError: the lab has no two hosts to probe between.
            LabError: the probes could not be started.
        """
        lab = self._run.setting.lab
        self._run.progress(f"probing {len(prober.pairs(lab.topology))} pairs of RNICs")
        with prober.start(lab, self._spec) as self._probing:
            yield

    def on_change(self, change: Change) -> None:
        """Look up the paths again. A line of a kernel's log (`subject` is `kernel`) changes no path."""
        if change.subject != "kernel" and self._probing is not None:
            self._probing.report_change()

    def end(self) -> None:
        """Stop the probes and collect their trips."""
        if self._probing is not None:
            self._probing.stop()
            self._trips = self._probing.collected()

    def sealed(self) -> ProbesEvidence | None:
        """Write the trips of the measured pass, and return how many there are."""
        if self._trips is None or self._run.phase != "measured":
            return None
        self._run.setting.run_dir.write_probes(self._trips, t0_ns=self._run.work.t0_ns)
        return ProbesEvidence(trips=len(self._trips.trips), unknown=self._trips.unknown, trouble=self._trips.trouble)


def _active(run: Pass) -> Active | None:
    probe = run.setting.experiment.probe
    return None if probe is None else Probes(run, probe)


def _uses(experiment: Experiment, hosts: Sequence[str]) -> Iterable[str]:
    """Return the hosts of the lab, because probes run between all of them."""
    return hosts if experiment.probe is not None else ()


def _says(experiment: Experiment) -> Iterator[str]:
    if probe := experiment.probe:
        each = f"{probe.per_s:g} a second on each of {probe.qps} queue pairs"
        yield f"probes from every RNIC to one in every rack, {each}"


PART = Part(name="probes", evidence=ProbesEvidence, says=_says, uses=_uses, active=_active)
