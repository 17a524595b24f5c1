"""The part `probes`: it probes the paths between racks in every pass, and keeps the trips of the measured one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec

from faultbed.harness.parts.part import Part
from faultbed.harness.parts.passes import Active, Ended, Pass
from faultbed.testbed.observe.telemetry import Change
from faultbed.traffic.probes import prober
from faultbed.traffic.probes.prober import Probing
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
    """Probes that look up their paths again after each change of a route or a link."""

    def __init__(self, probing: Probing) -> None:
        self._probing = probing
        self._trips: ProbeTrips | None = None

    def on_change(self, change: Change) -> None:
        """Look up the paths again. A line of a kernel's log (`subject` is `kernel`) changes no path."""
        if change.subject != "kernel":
            self._probing.report_change()

    def end(self) -> None:
        """Stop the probes and collect their trips."""
        self._probing.stop()
        self._trips = self._probing.collected()

    def sealed(self, ended: Ended) -> ProbesEvidence | None:
        """Write the trips of the measured pass, and return how many there are."""
        if self._trips is None or ended.phase == "twin":
            return None
        ended.run_dir.write_probes(self._trips, t0_ns=ended.t0_ns)
        return ProbesEvidence(trips=len(self._trips.trips), unknown=self._trips.unknown, trouble=self._trips.trouble)


@contextlib.contextmanager
def _around(run: Pass) -> Iterator[Active | None]:
    """Probe the paths between racks while the block lasts.

    Events of probes do not renew the reservation of the lab. Otherwise a workload that hangs would keep the lab
    reserved for as long as its probes run.

    Raises:
        UsageError: the lab has no two hosts to probe between.
        LabError: the probes could not be started.
    """
    if run.experiment.probe is None:
        yield None
        return
    run.progress(f"probing {len(prober.pairs(run.lab.topology))} pairs of RNICs")
    with prober.start(run.lab, run.experiment.probe) as probing:
        yield Probes(probing)


PART = Part(name="probes", evidence=ProbesEvidence, around=_around)
