"""A rank's program, cut into segments with their dependencies. Pure: no verbs, no clock.

A lane is the one-way path to or from one peer. The segments of a lane are numbered from 0 in the order in which they
travel, so both ends use the same numbers without exchanging them. Dependencies make pipelining safe:

- a send waits for the receives of earlier steps that touch the same elements;
- a receive waits until the sends of the same or an earlier step that touch the same elements are acknowledged, because
  the RNIC reads the buffer when it (re)transmits, not when the request is posted;
- receives that touch the same elements on different lanes are applied in step order;
- a send behind a fence waits for everything before the fence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Need", "Plan", "Segment", "make_plan"]

Need = tuple[tuple[int, int], ...]
"""Pairs (peer, number of segments that must be done on that peer's lane in this iteration), at most one per peer."""


class Segment(NamedTuple):
    """Elements [offset, offset + size) on a lane, with the segments that must be done before it is sent or applied."""

    step: int
    offset: int
    size: int
    reduce: bool
    received: Need
    acked: Need


class Plan(NamedTuple):
    """Segments by peer rank in each direction, and what must be received and acknowledged at each fence."""

    sends: dict[int, list[Segment]]
    recvs: dict[int, list[Segment]]
    phases: list[tuple[Need, Need]]


class _History:
    """Element ranges used so far, searchable by overlap. Buckets keep the cost of a lookup independent of the size."""

    def __init__(self, bucket: int) -> None:
        self.bucket = bucket
        self.entries: dict[int, list[tuple[int, int, int, int, int]]] = {}

    def _buckets(self, offset: int, count: int) -> range:
        return range(offset // self.bucket, (offset + count - 1) // self.bucket + 1)

    def add(self, step: int, offset: int, count: int, peer: int, number: int) -> None:
        for index in self._buckets(offset, count):
            self.entries.setdefault(index, []).append((step, offset, count, peer, number))

    def need(self, offset: int, count: int, before_step: int, *, exclude_peer: int = -1) -> Need:
        needed: dict[int, int] = {}
        for index in self._buckets(offset, count):
            for step, start, length, peer, number in self.entries.get(index, ()):
                if step < before_step and peer != exclude_peer and start < offset + count and offset < start + length:
                    needed[peer] = max(needed.get(peer, 0), number + 1)
        return tuple(needed.items())


def _all(lanes: dict[int, list[Segment]]) -> Need:
    return tuple((peer, len(lane)) for peer, lane in lanes.items())


def make_plan(program: dict[str, Any], segment_elements: int) -> Plan:
    """Cut a program of `traffic.schedules.program` into segments of at most `segment_elements`."""
    sends: dict[int, list[Segment]] = {}
    recvs: dict[int, list[Segment]] = {}
    sent, received = _History(segment_elements), _History(segment_elements)
    fences = list(program["fences"])
    phases: list[tuple[Need, Need]] = []
    behind: tuple[Need, Need] = ((), ())
    work = [(step, 0, dst, start, length, "") for step, dst, start, length in program["sends"]]
    work += [(step, 1, src, start, length, op) for step, src, start, length, op in program["recvs"]]
    for step, is_recv, peer, start, length, op in sorted(work, key=lambda item: item[:2]):
        while fences and step >= fences[0]:
            fences.pop(0)
            behind = _all(recvs), _all(sends)
            phases.append(behind)
        lane = (recvs if is_recv else sends).setdefault(peer, [])
        for offset in range(start, start + length, segment_elements):
            count = min(segment_elements, start + length - offset)
            if is_recv:
                acked = sent.need(offset, count, step + 1)
                # a lane always applies its own segments in order
                before = received.need(offset, count, step + 1, exclude_peer=peer)
                received.add(step, offset, count, peer, len(lane))
                lane.append(Segment(step, offset, count, reduce=op == "reduce", received=before, acked=acked))
            else:
                before = behind[0] + received.need(offset, count, step)
                sent.add(step, offset, count, peer, len(lane))
                lane.append(Segment(step, offset, count, reduce=False, received=before, acked=behind[1]))
    phases += [(_all(recvs), _all(sends))] * (len(fences) + 1)
    return Plan(sends, recvs, phases)
