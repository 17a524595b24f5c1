"""Connections of programs whose queue pairs we did not create: their ends are paired by their numbers. Pure.

The kernel lists a queue pair with its own number and that of its peer, without the peer's address. Two ends belong
together if each names the other. On machines that number their queue pairs alike, an end may have two such peers. It is
then kept with an unknown path, and never paired by a guess. Its connection names its own RNIC at both ends.

A process whose queue pairs could not be read, or of which none was ever seen, has such a connection, too: an empty
list does not show that it used nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from faultbed.traffic.engine.run_results import Connection, Endpoint

__all__ = ["Connections", "ListedQp"]

_UNCONNECTED = "ud"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedQp:
    """A queue pair as the kernel of its host listed it."""

    rank: int
    lqpn: int
    rqpn: int
    sq_psn: int
    rq_psn: int
    transport: str


class Connections:
    """The connections of processes, each with an index that stays while its two ends exist."""

    def __init__(self, ends: Sequence[Endpoint]) -> None:
        self._ends = tuple(ends)
        self._listed: dict[int, tuple[ListedQp, ...]] = {}
        self._index: dict[tuple[int, int, int, int], int] = {}
        self._last: dict[int, Connection] = {}
        self._unread: set[int] = set()
        self._paired: set[tuple[int, int, int]] = set()
        """Rank and both numbers of every end that was paired at some time."""

    def update(self, rank: int, listed: Sequence[Sequence[int | str]] | None) -> None:
        """Set the queue pairs of a process as they are now; None: unknown. Those that are gone stay in `all_seen`."""
        if listed is None:
            self._unread.add(rank)
            return
        self._listed[rank] = tuple(
            ListedQp(
                rank=rank,
                lqpn=int(entry[0]),
                rqpn=int(entry[1]),
                sq_psn=int(entry[2]),
                rq_psn=int(entry[3]),
                transport=str(entry[4]),
            )
            for entry in listed
        )
        self._last |= self._listed_now()

    def _listed_now(self) -> dict[int, Connection]:
        """Return a connection by index for each pair that is certain, and for each end without one."""
        every = [qp for several in self._listed.values() for qp in several]
        found: dict[int, Connection] = {}
        for qp in every:
            peers = _peers(qp, every, self._ends)
            if len(peers) == 1 and len(_peers(peers[0], every, self._ends)) == 1:
                src, dst = (qp, peers[0]) if qp.rank > peers[0].rank else (peers[0], qp)
                key = (src.rank, src.lqpn, dst.rank, dst.lqpn)
                self._paired |= {(end.rank, end.lqpn, end.rqpn) for end in (src, dst)}
            else:
                src, dst, key = qp, None, (qp.rank, qp.lqpn, -1, qp.rqpn)
            index = self._index.setdefault(key, len(self._index))
            found[index] = self._connection(index, src, dst)
        return found

    @property
    def now(self) -> tuple[Connection, ...]:
        """The connections that exist now. Data goes from the later role to the earlier one, ACKs the other way."""
        found = self._listed_now()
        return self._with_unknown([found[index] for index in sorted(found)], found)

    @property
    def all_seen(self) -> tuple[Connection, ...]:
        """Every connection of the run as it was seen last, in the order of their appearance."""
        seen = {index: one for index, one in self._last.items() if not self._was_unpaired_for_a_moment(index, one)}
        return self._with_unknown([seen[index] for index in sorted(seen)], seen)

    def _was_unpaired_for_a_moment(self, index: int, connection: Connection) -> bool:
        """Return whether an end without a peer had one earlier or later: both ends do not appear at the same look."""
        rank = next(key[0] for key, known in self._index.items() if known == index)
        return not connection.src_ip and (rank, connection.lqpn, connection.rqpn) in self._paired

    def _with_unknown(self, known: list[Connection], by_index: Mapping[int, Connection]) -> tuple[Connection, ...]:
        """Return connections, and one of an unknown path for each process of which some may be missing."""
        used = {end for connection in by_index.values() for end in (connection.src, connection.dst)}
        missing = [rank for rank, end in enumerate(self._ends) if rank in self._unread or end.name not in used]
        nothing = ListedQp(rank=0, lqpn=0, rqpn=0, sq_psn=0, rq_psn=0, transport="rc")
        unknown = [
            self._connection(
                self._index.setdefault((rank, 0, -1, 0), len(self._index)), replace(nothing, rank=rank), None
            )
            for rank in missing
        ]
        return (*known, *unknown)

    def _connection(self, index: int, src: ListedQp, dst: ListedQp | None) -> Connection:
        here = self._ends[src.rank]
        there = None if dst is None else self._ends[dst.rank]
        return Connection(
            index=index,
            src=here.name,
            dst=here.name if there is None else there.name,
            src_ip=here.address if there is not None else "",
            dst_ip="" if there is None else there.address,
            lqpn=src.lqpn,
            rqpn=src.rqpn,
            sq_psn=src.sq_psn,
            rq_psn=src.rq_psn,
            generation=0,
            transport=src.transport,
        )


def _peers(qp: ListedQp, every: Sequence[ListedQp], ends: Sequence[Endpoint]) -> list[ListedQp]:
    """Return the queue pairs of other RNICs that name this one and that it names."""
    if qp.transport == _UNCONNECTED:
        return []
    return [
        other
        for other in every
        if (other.lqpn, other.rqpn) == (qp.rqpn, qp.lqpn)
        and ends[other.rank].name != ends[qp.rank].name
        and other.transport == qp.transport
    ]
