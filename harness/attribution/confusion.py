"""Score the blind attribution against the faults that provably fired. Pure.

A run counts with its proven faults, or with none if it had none. Each finding of at least `CONFIDENT` either names the
place of a fault or is false; each fault is either named or missed. This gives precision and recall over all runs, as
Minder reports them (NSDI'25: .904 and .883). A run of at most one fault also has an entry in the confusion matrix, by
its most confident finding, and counts for "network or not".
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from faultbed.harness.attribution.attribute import attribute
from faultbed.harness.attribution.places import place_of_link, place_of_switch
from faultbed.harness.confidence import Interval, share_interval
from faultbed.harness.findings import Attribution
from faultbed.harness.proof import why_unproven_in
from faultbed.harness.record.evidence.fault_evidence import FaultRun
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.testbed.model.topology import Topology
from faultbed.traffic.engine.flight_recorder import Flight
from faultbed.traffic.probes.rtt import Trip

__all__ = ["CONFIDENT", "Score", "Truth", "score", "truth_of", "truths_of"]

CONFIDENT = 0.5
_NOTHING = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The place of a fault that fired.

    `names` are all names that count as correct; a soft GPU is a part of its host.
    """

    place: str
    names: frozenset[str]
    is_network: bool

    def named_by(self, finding: Attribution) -> bool:
        """Return whether a finding names this place."""
        return finding.name in self.names


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Counts over runs.

    Attributes:
        found, missed: number of faults that a confident finding named, or did not.
        correct, false: number of confident findings that name a fault, or none. These differ from `found`: one finding
            can name two faults at one place, and two findings can name one fault.
        matrix: number of runs with at most one fault, by (true place, named place); `right` of them are correct.
    """

    runs: int
    found: int
    missed: int
    correct: int
    false: int
    matrix: Counter[tuple[str, str]]
    single: int
    right: int
    network_right: int

    @property
    def recall(self) -> Interval | None:
        """Share of faults that were named."""
        faults = self.found + self.missed
        return share_interval(self.found, faults, level=0.95) if faults else None

    @property
    def precision(self) -> Interval | None:
        """Share of confident findings that name a fault."""
        confident_findings = self.correct + self.false
        return share_interval(self.correct, confident_findings, level=0.95) if confident_findings else None


def truths_of(run: RunEvidence) -> tuple[Truth, ...]:
    """Return the places of the faults that provably fired."""
    return tuple(truth_of(fault, run.lab.topology) for fault in run.injected.faults if not why_unproven_in(run, fault))


def score(runs: Iterable[tuple[RunEvidence, Sequence[Flight]]], probes: Iterable[Sequence[Trip]] = ()) -> Score:
    """Attribute each run blind, and score it against its faults. Runs with an unproven fault are left out.

    Runs with an error of the harness are left out, too. If such a run ended before its faults, finding nothing would
    count as correct.

    `probes` are the probes of each run, in the same order; runs beyond its end have none.
    """
    counted = named_faults = missed = correct = false = single = right = network_right = 0
    matrix: Counter[tuple[str, str]] = Counter()
    for (run, flights), trips in zip(runs, itertools.chain(probes, itertools.repeat(())), strict=False):
        truths = truths_of(run)
        if run.lab.errors or len(truths) != len(run.injected.faults):
            continue
        counted += 1
        findings = attribute(run, flights, trips)
        confident = [finding for finding in findings if finding.confidence >= CONFIDENT and finding.cause != "nothing"]
        named = [truth for truth in truths if any(truth.named_by(finding) for finding in confident)]
        named_faults, missed = named_faults + len(named), missed + len(truths) - len(named)
        naming = sum(any(truth.named_by(finding) for truth in truths) for finding in confident)
        correct, false = correct + naming, false + len(confident) - naming
        if len(truths) <= 1:
            single += 1
            top = findings[0]
            truth = truths[0] if truths else Truth(place=_NOTHING, names=frozenset({""}), is_network=False)
            matrix[truth.place, top.place] += 1
            right += truth.named_by(top)
            network_right += truth.is_network == top.is_network
    return Score(
        runs=counted,
        found=named_faults,
        missed=missed,
        correct=correct,
        false=false,
        matrix=matrix,
        single=single,
        right=right,
        network_right=network_right,
    )


def truth_of(fault: FaultRun, topology: Topology) -> Truth:
    """Return the place of a fault, as attribution would name it."""
    target = topology.resolve(fault.target)
    if target.kind in {"port", "rnic"} and target.link is not None:
        return Truth(place=place_of_link(topology, target.link), names=frozenset({target.link.name}), is_network=True)
    if target.kind == "switch":
        place = place_of_switch(topology, target.node)
        return Truth(place=place, names=frozenset({target.node}), is_network=True)
    host = topology.host_by_name[target.node]
    names = {host.name, *(f"{host.name}:{gpu.name}" for gpu in host.gpus)}
    place = "gpu" if target.kind == "gpu" else "storage" if fault.plan.kind.startswith("storage.") else "rank"
    return Truth(place=place, names=frozenset(names), is_network=False)
