"""Executor of the programs of all ranks on arrays, in any order that lanes allow."""

from __future__ import annotations

import numpy as np

from faultbed.traffic.node.ranks.segments import make_plan


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

    def __init__(self, made, elements, segment, slots, qps=1, spread="split"):
        self.slots = slots
        self.plans = [make_plan(program, segment, qps, spread) for program in made]
        self.data = memories(made, elements)
        self.wire = {(src, *lane): [] for src, plan in enumerate(self.plans) for lane in plan.sends}
        assert self.wire.keys() == {(src, dst, qp) for dst, plan in enumerate(self.plans) for src, qp in plan.recvs}
        self.lanes = {
            (src, dst, qp): (self.plans[src].sends[dst, qp], self.plans[dst].recvs[src, qp])
            for src, dst, qp in self.wire
        }
        self.sent = dict.fromkeys(self.wire, 0)
        self.applied = dict.fromkeys(self.wire, 0)

    def met(self, rank, segment):
        for (peer, qp), number in segment.received:
            if self.applied[peer, rank, qp] < number:
                return False
        return all(self.sent[rank, peer, qp] >= number for (peer, qp), number in segment.acked)

    def moves(self):
        for key, (sends, recvs) in self.lanes.items():
            sent, applied = self.sent[key], self.applied[key]
            if sent - applied < self.slots and sent < len(sends) and self.met(key[0], sends[sent]):
                yield "send", *key
            if self.wire[key] and self.met(key[1], recvs[applied]):
                yield "apply", *key

    def do(self, action, src, dst, qp):
        key = src, dst, qp
        if action == "send":
            segment = self.plans[src].sends[dst, qp][self.sent[key]]
            self.wire[key].append(self.data[src][segment.offset : segment.offset + segment.size].copy())
            self.sent[key] += 1
        else:
            segment = self.plans[dst].recvs[src, qp][self.applied[key]]
            target = self.data[dst][segment.offset : segment.offset + segment.size]
            piece = self.wire[key].pop(0)
            target[:] = target + piece if segment.reduce else piece
            self.applied[key] += 1

    def are_done(self):
        """Return whether everything was sent and applied. If not, and no move is left, it is a deadlock."""
        return all(
            self.sent[src, dst, qp] == len(self.plans[src].sends[dst, qp])
            and self.applied[src, dst, qp] == len(self.plans[dst].recvs[src, qp])
            for src, dst, qp in self.wire
        )
