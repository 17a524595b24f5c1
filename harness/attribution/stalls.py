"""Combine the flight recorders of a failed job: which rank waits for which, and which rank is the root cause. Pure.

Each rank reports which segment of which step it waits for, and from which peer. The chain of waiting ranks ends at the
cause: a rank without a recording, a rank that has not joined the collective (it still computes, or is an iteration
behind), or two ranks that wait for each other over a broken queue pair.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from faultbed.harness.quantities import format_duration
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.traffic.engine.flight_recorder import Flight

__all__ = ["Culprit", "Stall", "culprit", "stalls"]

_WAITS = re.compile(
    r"iteration (?P<iteration>\d+), step (?P<step>-?\d+): waits for segment (?P<segment>\d+) of \d+ "
    r"(?P<way>from|to) rank (?P<peer>\d+) \(QP (?P<qpn>\d+)(?:, (?P<state>[^)]*))?\)"
)
_UNHEARD = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Rank `waiter` waits in a step for a segment that `sender` has to send.

    `psn` and `connection` (its index) are -1 if they were not recorded.
    """

    iteration: int
    step: int
    waiter: int
    sender: int
    receiver: int
    segment: int
    qpn: int
    connection: int
    psn: int
    waited_ns: int
    broken: bool

    def describe(self, path: Sequence[str] = (), lost_at: str | None = None) -> str:
        """Return the stall as a sentence; `lost_at` is the link that the attribution names."""
        packet = f" for PSN {self.psn}" if self.psn >= 0 else f" for segment {self.segment}"
        location = f", lost at {lost_at}" if lost_at else f" over {' → '.join(path)}" if path else ""
        state = "; its queue pair is broken" if self.broken else ""
        return (
            f"iteration {self.iteration}, step {self.step}: rank {self.sender}→{self.receiver} waited "
            f"{format_duration(self.waited_ns)}{packet}{location}{state}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """The rank that is the root cause of a failed job, and the reasons."""

    rank: int
    confidence: float
    words: tuple[str, ...]


def stalls(flights: Sequence[Flight]) -> tuple[Stall, ...]:
    """Return what each waiting rank waits for, the earliest step first."""
    now_ns = max((entry.at_ns for flight in flights for entry in flight.entries), default=0)
    recorded = {flight.rank: flight for flight in flights}
    waiting = []
    for flight in flights:
        match = _WAITS.fullmatch(flight.standing)
        if match is None:
            continue
        peer, inward = int(match["peer"]), match["way"] == "from"
        sender, receiver = (peer, flight.rank) if inward else (flight.rank, peer)
        iteration, step, segment = int(match["iteration"]), int(match["step"]), int(match["segment"])
        qpn = int(match["qpn"])
        last_ns = max((entry.at_ns for entry in flight.entries if (entry.peer, entry.qpn) == (peer, qpn)), default=None)
        begun_ns = max((entry.at_ns for entry in flight.entries if entry.what == "begin"), default=now_ns)
        connection = _connection(flight, peer, qpn)
        waiting.append(
            Stall(
                iteration=iteration,
                step=step,
                waiter=flight.rank,
                sender=sender,
                receiver=receiver,
                segment=segment,
                qpn=qpn,
                connection=connection,
                psn=_psn(recorded.get(sender), iteration, receiver, segment, connection),
                waited_ns=now_ns - max(begun_ns, last_ns or 0),
                broken=match["state"] is not None,
            )
        )
    return tuple(sorted(waiting, key=lambda stall: (stall.iteration, stall.step, stall.waiter)))


def culprit(flights: Sequence[Flight], run: RunEvidence) -> Culprit | None:
    """Return the rank that is the root cause of a failed job; None without a recording or a clear result."""
    waiting = {stall.waiter: stall for stall in stalls(flights)}
    recorded = {flight.rank: flight for flight in flights}
    if not waiting:
        return _unheard(recorded, run)
    votes: dict[int, list[str]] = {}
    for start in waiting:
        rank, visited = start, [start]
        while rank in waiting and (peer := _peer(waiting[rank])) not in visited:
            visited.append(peer)
            rank = peer
        if rank not in waiting:
            chain = " waits for ".join(f"rank {visited_rank}" for visited_rank in visited)
            votes.setdefault(rank, []).append(chain)
    if not votes:
        return _most_broken(waiting, run)
    root = max(votes, key=lambda rank: len(votes[rank]))
    if root in recorded and (unheard := _unheard(recorded, run)) is not None:
        return unheard  # waiting for a rank that computes is normal
    why = (
        f"rank {root} left no recording"
        if root not in recorded
        else f"rank {root} has not joined: {recorded[root].standing}"
    )
    share = len(votes[root]) / len(waiting)
    first = min(waiting.values(), key=lambda stall: (stall.iteration, stall.step))
    return Culprit(rank=root, confidence=0.6 + 0.35 * share, words=(why, max(votes[root], key=len), first.describe()))


def _unheard(recorded: Mapping[int, Flight], run: RunEvidence) -> Culprit | None:
    """Return the rank without a recording, if all other ranks have one."""
    silent = [rank.rank for rank in run.workload.ranks if rank.rank not in recorded]
    if len(silent) != 1 or not recorded:
        return None
    standing = next(iter(recorded.values())).standing
    words = (f"rank {silent[0]} left no recording, the others did when the job failed: {standing}",)
    return Culprit(rank=silent[0], confidence=_UNHEARD, words=words)


def _most_broken(waiting: Mapping[int, Stall], run: RunEvidence) -> Culprit | None:
    """Return the rank with the most broken queue pairs, if one stands out; used if all ranks wait in a cycle."""
    ends: dict[int, int] = {}
    for stall in waiting.values():
        if stall.broken:
            for rank in (stall.sender, stall.receiver):
                ends[rank] = ends.get(rank, 0) + 1
    ranked = sorted(ends, key=lambda rank: -ends[rank])
    if len(ranked) < 2 or ends[ranked[0]] == ends[ranked[1]] or len(run.workload.ranks) <= 2:  # noqa: PLR2004 - of two ranks, neither stands out
        return None
    words = f"{ends[ranked[0]]} broken queue pairs end at rank {ranked[0]}, fewer at any other"
    return Culprit(rank=ranked[0], confidence=0.6, words=(words,))


def _peer(stall: Stall) -> int:
    return stall.sender if stall.waiter == stall.receiver else stall.receiver


def _connection(flight: Flight, peer: int, qpn: int) -> int:
    """Return the number of the connection that a rank's QP belongs to; -1 if its flight recorder does not have it."""
    connections = (entry.connection for entry in reversed(flight.entries) if (entry.peer, entry.qpn) == (peer, qpn))
    return next(connections, -1)


def _psn(flight: Flight | None, iteration: int, receiver: int, segment: int, connection: int) -> int:
    """Return the PSN that the sender gave the segment, from its flight recorder; -1 if it is not recorded.

    Each connection numbers its own segments. `connection` is -1 in recordings of older versions, in which a rank had
    one connection to each peer.
    """
    for entry in reversed(flight.entries if flight else ()):
        is_segment = (entry.iteration, entry.peer, entry.segment) == (iteration, receiver, segment)
        if entry.what == "post" and is_segment and (connection in (-1, entry.connection) or entry.connection < 0):
            return entry.psn
    return -1
