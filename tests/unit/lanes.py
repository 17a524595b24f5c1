"""Programs of all ranks, executed on arrays in any order that lanes allow."""

from __future__ import annotations

import numpy as np

from traffic import schedules
from traffic.node.ranks.segments import make_plan


def inputs_of(rank, elements):
    return np.arange(elements) * (rank + 3) + rank * rank


def memories(made, elements):
    collected = []
    for program in made:
        memory = np.full(program["elements"], -(10**9))
        for offset, count, index, _ in program["fills"]:
            memory[offset : offset + count] = inputs_of(program["rank"], elements)[index : index + count]
        for to, of, count in program["copies"]:
            memory[to : to + count] = memory[of : of + count]
        collected.append(memory)
    return collected


class Lanes:
    """Executes the plans of all ranks on arrays, delivering segments in an order that a test chooses.

    A sender has at most `slots` segments under way that are not applied, as on the wire.
    """

    def __init__(self, made, elements, segment, slots):
        self.slots = slots
        self.plans = [make_plan(program, segment) for program in made]
        self.data = memories(made, elements)
        self.wire = {pair: [] for pair in schedules.peers_of(made)}
        self.sent = dict.fromkeys(self.wire, 0)
        self.applied = dict.fromkeys(self.wire, 0)

    def met(self, rank, segment):
        return all(self.applied[p, rank] >= n for p, n in segment.received) and all(
            self.sent[rank, p] >= n for p, n in segment.acked
        )

    def moves(self):
        for src, dst in self.wire:
            lane = self.plans[src].sends.get(dst, [])
            room = self.sent[src, dst] - self.applied[src, dst] < self.slots
            if room and self.sent[src, dst] < len(lane) and self.met(src, lane[self.sent[src, dst]]):
                yield "send", src, dst
            lane = self.plans[dst].recvs.get(src, [])
            if self.wire[src, dst] and self.met(dst, lane[self.applied[src, dst]]):
                yield "apply", src, dst

    def do(self, what, src, dst):
        if what == "send":
            segment = self.plans[src].sends[dst][self.sent[src, dst]]
            self.wire[src, dst].append(self.data[src][segment.offset : segment.offset + segment.size].copy())
            self.sent[src, dst] += 1
        else:
            segment = self.plans[dst].recvs[src][self.applied[src, dst]]
            target = self.data[dst][segment.offset : segment.offset + segment.size]
            piece = self.wire[src, dst].pop(0)
            target[:] = target + piece if segment.reduce else piece
            self.applied[src, dst] += 1

    def are_done(self):
        """Whether all has been sent and applied; with no move left, otherwise, they wait for each other for ever."""
        return all(
            self.sent[src, dst] == len(self.plans[src].sends.get(dst, []))
            and self.applied[src, dst] == len(self.plans[dst].recvs.get(src, []))
            for src, dst in self.wire
        )
