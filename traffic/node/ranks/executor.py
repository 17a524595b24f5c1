"""Execution of a rank's program: its segments are sent and applied as soon as their dependencies allow.

The program is executed once per round. Rounds are counted from 0; they are the rank's iterations since it began, or
since the checkpoint from which it resumed. The fences of a program separate its phases
(`faultbed.traffic.node.ranks.segments`).
"""

from __future__ import annotations

import time

import numpy as np

from faultbed.traffic.node.ranks.gate import Gate
from faultbed.traffic.node.ranks.lane import LAST, Lane, LaneSetup
from faultbed.traffic.node.ranks.parts_clock import COMPLETION, COPY, PartsClock
from faultbed.traffic.node.ranks.rank_memory import Memory
from faultbed.traffic.node.ranks.recorder import Recorder
from faultbed.traffic.node.ranks.recv_lane import RecvLane
from faultbed.traffic.node.ranks.segments import LaneKey, Need, make_plan
from faultbed.traffic.node.ranks.send_lane import SendLane, SprayLane
from faultbed.traffic.node.task import Conn
from faultbed.traffic.node.verbs import Rnic

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from typing import Any

    import numpy.typing as npt

    Array = npt.NDArray[Any]

__all__ = ["EAGER_BYTES", "Executor"]

EAGER_BYTES = 65536
"""Programs whose messages are all at most this long are sent eagerly (`traffic/node/ranks/send_lane.py`). It is the
eager limit of Open MPI over TCP."""


class Executor:
    """The lanes of a rank, and the progress of its program in this round.

    `spec` is that of the rank (`faultbed.traffic.node.ranks.rank.RankTask`). `conns` are the rank's connections by
    number.
    """

    def __init__(
        self, rnic: Rnic, spec: dict[str, Any], conns: dict[int, Conn], memory: Memory, recorder: Recorder
    ) -> None:
        program = spec["program"]
        self.memory = memory
        self.data = memory.array
        self.mr = rnic.register(self.data.ctypes.data, self.data.nbytes)
        self.recorder = recorder
        self.clock = PartsClock()
        self.gate = Gate(program.get("pauses", []), program["fences"])
        self.slots = spec["slots"]
        self.segment_elements = spec["segment_bytes"] // self.data.itemsize
        longest = max((length for *_, length in program["sends"]), default=0)
        self.is_eager = longest * self.data.itemsize <= EAGER_BYTES
        self.send_lanes: dict[LaneKey, SendLane] = {}
        self.recv_lanes: dict[LaneKey, RecvLane] = {}
        self.send_by_conn: dict[int, SendLane] = {}
        self.recv_by_conn: dict[int, RecvLane] = {}
        self._unsent: dict[SendLane, None] = {}  # lanes with segments to post in this round, or to repeat
        self._unapplied: dict[RecvLane, None] = {}  # lanes with segments that have arrived
        self.phases = self._make_lanes(rnic, spec, conns)
        self._met = 0  # conditions of the open phase that are met; they stay met until the round ends
        self.round = -1
        self.last_round: int | None = None
        """The last round, once it is known. A peer's flag may name a later round than this one."""
        self.start_ns = self.first_data_ns = 0
        self.phases_ns: list[int] = []
        """End of each phase, relative to the start of the round."""
        self.parts_ns: list[int] = []
        """How long each part of the last round took (`faultbed.traffic.node.ranks.parts_clock`)."""
        self.wake_ns: int | None = None
        """When `advance` must be called at the latest, because a pause of the program ends."""

    def _make_lanes(self, rnic: Rnic, spec: dict[str, Any], conns: dict[int, Conn]) -> list[list[tuple[Lane, int]]]:
        """Create the lanes. Return the conditions for the end of each phase: segments that are done on a lane."""
        setup = LaneSetup(
            conns=conns,
            slots=self.slots,
            window=spec["window"],
            segment_bytes=spec["segment_bytes"],
            item_bytes=self.data.itemsize,
            mtu=spec["qp"]["mtu"],
            recorder=self.recorder,
            clock=self.clock,
        )
        # With these two, all queue pairs to a peer are one lane.
        is_one = spec["spread"] in ("spray", "dqplb")
        qps, spread = (1, "split") if is_one else (spec["qps_per_peer"], spec["spread"])
        plan = make_plan(spec["program"], self.segment_elements, qps, spread)
        conn_numbers: dict[tuple[str, LaneKey], list[int]] = {}
        for number, direction, peer, qp in spec["lanes"]:
            conn_numbers.setdefault((direction, (peer, qp % qps)), []).append(number)
        for (direction, key), numbers in conn_numbers.items():
            if direction == "out":
                kind = SprayLane if spec["spread"] == "spray" and len(numbers) > 1 else SendLane
                # numpy makes an object for each `ctypes`: too slow for every post
                source: dict[str, Any] = {"mr": self.mr, "address": self.data.ctypes.data}
                if self.is_eager:
                    ring = self._ring()
                    source = {
                        "mr": rnic.register(ring.ctypes.data, ring.nbytes),
                        "address": ring.ctypes.data,
                        "ring": ring,
                    }
                out = kind(numbers, key[0], plan.sends[key], setup, **source)
                self.send_lanes[key] = out
                self.send_by_conn |= dict.fromkeys(numbers, out)
            else:
                staging = self._ring()
                mr = rnic.register(staging.ctypes.data, staging.nbytes)
                lane = RecvLane(numbers, key[0], plan.recvs[key], setup, mr=mr, staging=staging)
                self.recv_lanes[key] = lane
                self.recv_by_conn |= dict.fromkeys(numbers, lane)
        if self.send_lanes.keys() != plan.sends.keys() or self.recv_lanes.keys() != plan.recvs.keys():
            raise ValueError(f"connections {spec['lanes']} are not those of the program's segments")
        return [
            [(self.recv_lanes[key], number) for key, number in received]
            + [(self.send_lanes[key], number) for key, number in sent]
            for received, sent in plan.phases
        ]

    def _ring(self) -> Array:
        return np.zeros(self.slots * self.segment_elements, dtype=self.data.dtype)

    def next_round(self) -> None:
        """Prepare the next round: segments are counted from its start. `begin` starts it."""
        self.round += 1
        for out in self.send_lanes.values():
            out.base = self.round * len(out.segments)
            self._unsent[out] = None
        for lane in self.recv_lanes.values():
            lane.base = self.round * len(lane.segments)

    def begin(self, now_ns: int) -> None:
        """Start the round with its local copies. Data may have arrived before."""
        self.start_ns = now_ns
        self.phases_ns = []
        self.clock.begin(now_ns)
        self.gate.begin(now_ns)
        self._met = 0
        self.first_data_ns = now_ns if self._unapplied else 0
        self.clock.enter(COPY)
        self.memory.copy()
        self.clock.enter(COMPLETION)

    def advance(self, now_ns: int) -> bool:
        """Send and apply all segments that may be. Return whether the round is complete.

        Sending comes first: peers wait for it.
        """
        moved = True
        while moved:
            moved = self.clock.needs_credit = False
            self.wake_ns = self.gate.advance(len(self.phases_ns), now_ns)
            # Most lanes are idle most of the time, and 16 queue pairs per peer make many.
            for out in list(self._unsent):
                moved |= self._send(out, now_ns)
                if not out.to_repeat and out.posted - out.base == len(out.segments):
                    del self._unsent[out]
            for lane in list(self._unapplied):
                moved |= self._apply(lane, now_ns)
                if lane.applied == lane.received:
                    del self._unapplied[lane]
            while len(self.phases_ns) < len(self.phases) and self._is_phase_done():
                now_ns = time.monotonic_ns()
                self.phases_ns.append(now_ns - self.start_ns)
                self._met = 0
                moved = True
        if len(self.phases_ns) < len(self.phases):
            return False
        # The queue pairs are destroyed after the last round, so all its segments must be acknowledged first.
        return self.round != self.last_round or all(out.acked == out.posted for out in self.send_lanes.values())

    def arrive(self, lane: RecvLane, conn: Conn, sequence: int) -> int | None:
        """Note a segment (`RecvLane.arrive`)."""
        self._unapplied[lane] = None
        return lane.arrive(conn, sequence)

    def resume(self, out: SendLane, conn: Conn) -> list[int]:
        """Continue on a rebuilt connection (`SendLane.resume`)."""
        self._unsent[out] = None
        return out.resume(conn)

    def repeat_lost(self, now_ns: int) -> None:
        """Post the segments that were lost with their connection; between two rounds only eager lanes have any."""
        for out in self._unsent:
            if out.to_repeat:
                self._repeat(out, now_ns)

    def end(self) -> int:
        """End a complete round: turn sums into averages. Return the time in ns."""
        self.clock.enter(COPY)
        self.memory.divide()
        now_ns = time.monotonic_ns()
        self.parts_ns = self.clock.end(now_ns)
        self.wake_ns = None
        return now_ns

    def close(self) -> None:
        """Deregister the memory."""
        for lane in self.recv_lanes.values():
            lane.mr.close()
        for out in self.send_lanes.values():
            if out.ring is not None:
                out.mr.close()
        self.mr.close()

    def _is_phase_done(self) -> bool:
        needs = self.phases[len(self.phases_ns)]
        while self._met < len(needs):
            lane, number = needs[self._met]
            if lane.done() - lane.base < number:
                return False
            self._met += 1
        return True

    def _is_met(self, received: Need, sent: Need) -> bool:
        """Return whether segments are done (`Lane.done`)."""
        for key, number in received:
            lane = self.recv_lanes[key]
            if lane.done() - lane.base < number:
                return False
        for key, number in sent:
            out = self.send_lanes[key]
            if out.done() - out.base < number:
                return False
        return True

    def _apply(self, lane: RecvLane, now_ns: int) -> bool:
        """Copy or reduce the segments that have arrived, in order. Return whether there were any."""
        start = lane.applied
        limit = min(lane.received, lane.base + len(lane.segments))
        while lane.applied < limit:
            segment = lane.segments[lane.applied - lane.base]
            if (segment.received or segment.acked) and not self._is_met(segment.received, segment.acked):
                break
            at = lane.applied % self.slots * self.segment_elements
            source = lane.staging[at : at + segment.size]
            target = self.data[segment.offset : segment.offset + segment.size]
            self.clock.enter(COPY)
            if segment.reduce:
                self.memory.reduce(target, source)
            else:
                target[:] = source
            self.clock.enter(COMPLETION)
            self.recorder.add_segment("apply", lane, lane.conns[lane.conn_numbers[0]], lane.applied)
            lane.applied += 1
        if lane.applied == start:
            return False
        lane.send_credit(now_ns)
        return True

    def _send(self, out: SendLane, now_ns: int) -> bool:
        """Post segments while a connection is free: first those that were lost. Return whether there were any."""
        moved = self._repeat(out, now_ns) if out.to_repeat else False
        flags = LAST if self.last_round == self.round else 0
        while not out.to_repeat and (conn := out.free_connection()) and self._may_send(out):
            number = out.posted
            out.posted += 1
            if out.ring is not None:
                out.copy(out.ring, number, self.data)
            out.post(conn, number, flags, now_ns)
            moved = True
        return moved

    def _repeat(self, out: SendLane, now_ns: int) -> bool:
        moved = False
        while out.to_repeat and (conn := out.free_connection()):
            number = out.to_repeat.pop(0)
            out.post(conn, number, LAST if number // len(out.segments) == self.last_round else 0, now_ns)
            moved = True
        return moved

    def _may_send(self, out: SendLane) -> bool:
        """Return whether the next segment of this round may be posted."""
        if out.posted - out.base == len(out.segments) or out.posted - out.acked >= self.slots:
            return False
        if out.posted - out.peer_applied >= self.slots:
            self.clock.needs_credit = True
            return False
        segment = out.segments[out.posted - out.base]
        if segment.step >= self.gate.step:
            return False
        return not (segment.received or segment.acked) or self._is_met(segment.received, segment.acked)
