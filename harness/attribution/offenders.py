"""Repeat offenders: places that runs and preflights blame repeatedly, and the action that each needs. Pure.

A strike is one confident finding of one run, or one wrong result of one preflight. A place gets at most one strike
from each run or preflight. Its score is the sum of its strikes, each halved for every `half_life` that has passed. A
run with injected faults blames nothing, because its findings are the effect of those faults. Such runs count only on
request, and then only findings that none of their faults explains. A run that ended in ERROR gives no strikes, because
the harness failed and its measurements may be wrong.

A GPU whose newest reading has reached a threshold (`faultbed.testbed.observe.gpu_thresholds`) is drained or returned
at once, whatever its score and however its run ended: the GPU itself reports it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from faultbed.harness.attribution.confusion import CONFIDENT, truth_of
from faultbed.harness.attribution.gpu_readings import GpuReading, newest
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.verdict import Verdict, VerdictFile
from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.observe.gpu_thresholds import ACTIONS, Action, Breach, severest
from faultbed.traffic.flows.burnin import ends_in_common

__all__ = ["Offender", "Strike", "Thresholds", "offenders", "strikes_of_preflight", "strikes_of_run"]

_LEFT_BEHIND = frozenset({"leftovers", "reservations"})
"""Checks of preflight that see what a fault, or a command that was killed, has left behind."""
_PAIRS_TO_BLAME = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One time that a place was blamed.

    Attributes:
        name: the host, GPU, RNIC, switch or link, as the inventory names it.
        cause: what was wrong: a cause of the attribution, or a check of preflight.
        origin: name of the run or the preflight.
        at: when, in UTC.
        weight: confidence of the finding, 0 to 1; 1 for a preflight, which reads the place itself.
    """

    name: str
    cause: str
    origin: str
    at: datetime
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Scores (in strikes) at which to act. A strike counts half after `half_life`."""

    drain: float = 1.5
    rma: float = 3.0
    half_life: timedelta = timedelta(days=7)

    def __post_init__(self) -> None:
        if not 0 < self.drain <= self.rma:
            raise UsageError(
                f"offenders: --drain {self.drain:g} and --rma {self.rma:g}: 0 < drain <= RMA must hold; correct one"
            )
        if self.half_life <= timedelta(0):
            raise UsageError("offenders: --half-life: must be more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offender:
    """A host, GPU, RNIC, switch or link that was blamed.

    Attributes:
        host: the host to drain; empty for switches and for links between them.
        strikes: newest first.
        score: sum of the strikes' weights, decayed.
        breaches: thresholds that a GPU's newest reading has reached, the severest first.
        last: time of the newest strike or, with breaches, of the newest reading.
    """

    name: str
    host: str
    strikes: tuple[Strike, ...]
    score: float
    action: Action
    breaches: tuple[Breach, ...] = ()
    last: datetime

    @property
    def causes(self) -> tuple[str, ...]:
        """The reasons for the action: thresholds first, then the causes of the strikes."""
        return (*(breach.text for breach in self.breaches), *dict.fromkeys(strike.cause for strike in self.strikes))


def strikes_of_run(
    run: RunEvidence, verdict: VerdictFile, *, origin: str, at: datetime, drills: bool = False, rehearsal: bool = False
) -> tuple[Strike, ...]:
    """Return the strikes of a run.

    Args:
        run: its measurements.
        verdict: its verdict, with the attribution.
        origin: name of the run.
        at: when it began.
        drills: count findings of runs with injected faults as well, unless one of those faults explains them.
        rehearsal: count all findings, as if nothing had been injected.

    Hosts that took no part are never blamed: a finding that names an idle spare is a mistake. A host that the job lost
    and replaced has taken part. A run that ended in ERROR blames nothing.
    """
    if verdict.verdict is Verdict.ERROR or (run.injected.faults and not (drills or rehearsal)):
        return ()
    explained = (
        set[str]()
        if rehearsal
        else {name for fault in run.injected.faults for name in truth_of(fault, run.lab.topology).names}
    )
    took_part = {rank.host for rank in run.workload.ranks}
    for restart in run.workload.resilience.restarts if run.workload.resilience is not None else ():
        took_part |= {name.partition(":")[0] for name in (*restart.before, *restart.after, *restart.hosts)}
    best: dict[str, Strike] = {}
    for finding in verdict.attribution:
        host = _host_of(run.lab.topology, finding.name)
        is_spare = bool(host) and host not in took_part and finding.place != "storage"
        if finding.cause == "nothing" or finding.confidence < CONFIDENT or finding.name in explained or is_spare:
            continue
        if finding.name not in best or finding.confidence > best[finding.name].weight:
            best[finding.name] = Strike(
                name=finding.name, cause=finding.cause, origin=origin, at=at, weight=finding.confidence
            )
    return tuple(best.values())


def strikes_of_preflight(content: Any, *, origin: str, at: datetime) -> tuple[Strike, ...]:
    """Return the strikes of a preflight: one for each host, RNIC, switch or link that a check found wrong.

    If a pair of RNICs failed the burn-in, the end that it shares with other failed pairs is blamed; without a shared
    end, neither is. What a fault or a command left behind is not a defect. A finding about the whole lab, such as a
    burn-in that did not start, blames no place.

    Args:
        content: what `faultbed preflight --json` printed, decoded.
        origin: name of the file.
        at: when it was written.

    Raises:
        UsageError: `content` is not the output of a preflight.
    """
    wrong = content.get("wrong") if isinstance(content, dict) else None
    if not isinstance(wrong, list) or not all(
        isinstance(row, dict) and {"check", "where"} <= set(row) for row in wrong
    ):
        raise UsageError(f"{origin}: not what `faultbed preflight --json` prints; give a file that --out has written")
    for key, kind in (("checked", str), ("not_looked", dict)):
        entries = content.get(key, [])
        if not isinstance(entries, list) or not all(isinstance(entry, kind) for entry in entries):
            expected = "names of checks" if kind is str else "objects"
            raise UsageError(f"{origin}: {key}: must be a list of {expected}; give a file that --out has written")
    best: dict[str, Strike] = {}
    pairs: dict[tuple[str, str], str] = {}
    for row in wrong:
        cause, place = str(row["check"]), str(row["where"])
        src, is_pair, dst = place.partition(" > ")
        name = place.partition(" ")[0]
        if is_pair:
            pairs.setdefault((src, dst), cause)
        elif name and name not in best and cause not in _LEFT_BEHIND and place != content.get("lab"):
            best[name] = Strike(name=name, cause=cause, origin=origin, at=at, weight=1.0)
    for name in _ends_to_blame(pairs, best):
        cause = next(cause for ends, cause in pairs.items() if name in ends)
        best[name] = Strike(name=name, cause=cause, origin=origin, at=at, weight=1.0)
    return tuple(best.values())


def _ends_to_blame(pairs: Iterable[tuple[str, str]], blamed: Iterable[str]) -> Iterator[str]:
    """Yield the ends that explain several failed pairs: repeatedly the end of most of the pairs not yet explained."""
    known = set(blamed)
    for ends, count in ends_in_common({frozenset(pair) for pair in pairs if known.isdisjoint(pair)}):
        if count < _PAIRS_TO_BLAME or len(ends) > 1:
            return
        yield ends[0]


def offenders(
    strikes: Iterable[Strike],
    topology: Topology,
    thresholds: Thresholds,
    *,
    now: datetime,
    readings: Iterable[GpuReading] = (),
) -> tuple[Offender, ...]:
    """Return everything that was blamed, with the action that it needs: the severest first, then the highest score.

    Only the newest of the `readings` of each GPU counts; a reading dated in the future never replaces another one. RMA
    by score needs strikes on several days, as many as the threshold in whole strikes, so that one bad night does not
    replace a part. A strike dated in the future, by a wrong clock, counts as a strike of today.
    """
    by_name: dict[str, list[Strike]] = {}
    for strike in strikes:
        by_name.setdefault(strike.name, []).append(strike)
    reached = {name: reading for name, reading in newest(readings, now=now).items() if reading.breaches}
    ranking = []
    for name in (*by_name, *(other for other in reached if other not in by_name)):
        own_strikes, reading = by_name.get(name, []), reached.get(name)
        newest_first = tuple(sorted(own_strikes, key=lambda strike: strike.at, reverse=True))
        score = sum(strike.weight * 0.5 ** (_age(strike, now) / thresholds.half_life) for strike in own_strikes)
        breaches = reading.breaches if reading else ()
        by_score = _action(newest_first, score, thresholds, now)
        times = [strike.at for strike in own_strikes] + ([reading.at] if reading else [])
        ranking.append(
            Offender(
                name=name,
                host=_host_of(topology, name),
                strikes=newest_first,
                score=score,
                action=severest([by_score, *(breach.action for breach in breaches)]),
                breaches=breaches,
                last=max(times),
            )
        )
    return tuple(
        sorted(ranking, key=lambda offender: (-ACTIONS.index(offender.action), -offender.score, offender.name))
    )


def _action(strikes: Sequence[Strike], score: float, thresholds: Thresholds, now: datetime) -> Action:
    days = {min(strike.at, now).date() for strike in strikes}
    if score >= thresholds.rma and len(days) >= int(thresholds.rma):
        return "RMA"
    return "drain" if score >= thresholds.drain else "watch"


def _age(strike: Strike, now: datetime) -> timedelta:
    return max(now - strike.at, timedelta(0))


def _host_of(topology: Topology, name: str) -> str:
    """Return the host of a name such as `host1`, `host1:gpu0` or `rtsw1:host1:rxe0`; empty for switches and uplinks."""
    for word in re.split(r"[:\s]", name):
        if word in topology.host_by_name:
            return word
    return ""
