"""A rank's program, cut into segments with their dependencies. Pure: no verbs, no clock.

A lane is one queue pair to or from one peer. The segments of a lane are numbered from 0 in the order in which they
travel, so both ends use the same numbers without exchanging them. With `spray` and `dqplb` all queue pairs of a peer
are one lane, which is planned here like one queue pair (`faultbed.traffic.node.ranks.lane`). Otherwise `spread` is one
of

    split         every message is cut into equal parts, one for each queue pair (NCCL_IB_SPLIT_DATA_ON_QPS=1)
    round-robin   segments of at most `segment_elements` take the queue pairs in turn (NCCL_IB_SPLIT_DATA_ON_QPS=0)

A queue pair that gets no segment has no lane. Dependencies make pipelining safe:

- a send waits for the receives of earlier steps that touch the same elements;
- a received segment is applied only when the sends of the same or an earlier step that touch the same elements are done
  (`faultbed.traffic.node.ranks.lane.Lane.done`). A send is done when it is acknowledged, because the RNIC reads the
  buffer when it (re)transmits. An eager lane sends from a copy, so its sends are done when they are posted;
- receives that touch the same elements on different lanes are applied in step order;
- a send behind a fence waits for everything before the fence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

__all__ = ["LaneKey", "Need", "Plan", "Segment", "make_plan"]

LaneKey = tuple[int, int]
"""(peer, number of the queue pair among those of this peer and direction, from 0)."""

Need = tuple[tuple[LaneKey, int], ...]
"""Pairs (lane, number of segments that must be done on it in this iteration), at most one per lane."""


class Segment(NamedTuple):
    """Elements [offset, offset + size) on a lane, and which receives and sends must be done before it moves.

    `received` and `acked` are these receives and sends. A segment to send moves when it is posted, a received one when
    it is applied.
    """

    step: int
    offset: int
    size: int
    reduce: bool
    received: Need
    acked: Need


class Plan(NamedTuple):
    """Segments by lane in each direction, and for each phase the receives and sends that must be done at its end."""

    sends: dict[LaneKey, list[Segment]]
    recvs: dict[LaneKey, list[Segment]]
    phases: list[tuple[Need, Need]]


class _History:
    """Element ranges used so far, searchable by overlap. Buckets keep the cost of a lookup independent of the size."""

    def __init__(self, bucket: int) -> None:
        self.bucket = bucket
        self.entries: dict[int, list[tuple[int, int, int, LaneKey, int]]] = {}

    def _buckets(self, offset: int, count: int) -> range:
        return range(offset // self.bucket, (offset + count - 1) // self.bucket + 1)

    def add(self, step: int, offset: int, count: int, lane: LaneKey, number: int) -> None:
        for index in self._buckets(offset, count):
            self.entries.setdefault(index, []).append((step, offset, count, lane, number))

    def need(self, offset: int, count: int, before_step: int, *, exclude: LaneKey | None = None) -> Need:
        needed: dict[LaneKey, int] = {}
        for index in self._buckets(offset, count):
            for step, start, length, lane, number in self.entries.get(index, ()):
                if step < before_step and lane != exclude and start < offset + count and offset < start + length:
                    needed[lane] = max(needed.get(lane, 0), number + 1)
        return tuple(needed.items())


def _all(lanes: dict[LaneKey, list[Segment]]) -> Need:
    return tuple((key, len(lane)) for key, lane in lanes.items())


def _cut(
    offset: int, length: int, segment_elements: int, *, qps: int, spread: str, before: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (queue pair, offset, size) of each segment of a message, after `before` segments to the same peer."""
    parts = min(qps, length) if spread == "split" else 1
    for part in range(parts):
        first, end = offset + length * part // parts, offset + length * (part + 1) // parts
        for number, at in enumerate(range(first, end, segment_elements)):
            qp = part if spread == "split" else (before + number) % qps
            yield qp, at, min(segment_elements, end - at)


def make_plan(program: dict[str, Any], segment_elements: int, qps: int = 1, spread: str = "split") -> Plan:
    """Cut a program of `faultbed.traffic.schedules.program` into segments of at most `segment_elements`.

    The segments of each pair of ranks are spread over at most `qps` queue pairs.
    """
    sends: dict[LaneKey, list[Segment]] = {}
    recvs: dict[LaneKey, list[Segment]] = {}
    sent, received = _History(segment_elements), _History(segment_elements)
    fences = list(program["fences"])
    phases: list[tuple[Need, Need]] = []
    behind: tuple[Need, Need] = ((), ())
    cut: dict[tuple[int, int], int] = {}  # segments so far, by (direction, peer)
    work = [(step, 0, dst, start, length, "") for step, dst, start, length in program["sends"]]
    work += [(step, 1, src, start, length, op) for step, src, start, length, op in program["recvs"]]
    for step, is_recv, peer, start, length, op in sorted(work, key=lambda item: item[:2]):
        while fences and step >= fences[0]:
            fences.pop(0)
            behind = _all(recvs), _all(sends)
            phases.append(behind)
        before = cut.get((is_recv, peer), 0)
        segments = list(_cut(start, length, segment_elements, qps=qps, spread=spread, before=before))
        cut[is_recv, peer] = before + len(segments)
        for qp, offset, count in segments:
            key = peer, qp
            lane = (recvs if is_recv else sends).setdefault(key, [])
            if is_recv:
                acked = sent.need(offset, count, step + 1)
                # a lane always applies its own segments in order
                earlier = received.need(offset, count, step + 1, exclude=key)
                received.add(step, offset, count, key, len(lane))
                lane.append(Segment(step, offset, count, reduce=op == "reduce", received=earlier, acked=acked))
            else:
                earlier = behind[0] + received.need(offset, count, step)
                sent.add(step, offset, count, key, len(lane))
                lane.append(Segment(step, offset, count, reduce=False, received=earlier, acked=behind[1]))
    phases += [(_all(recvs), _all(sends))] * (len(fences) + 1)
    return Plan(sends, recvs, phases)
