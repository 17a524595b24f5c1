"""The sending end of a lane: posts segments, notes acknowledgements and credits, and repeats segments of a lost QP.

A segment is read from the rank's memory, which must not change before the acknowledgement. An eager lane has a ring of
`slots` slots instead, like the receiver's: each segment is copied there first. An operation then ends without the
acknowledgements of its own segments, as with the eager protocol of MPI and the FIFOs of NCCL.
"""

from __future__ import annotations

from faultbed.traffic.node.ranks.lane import MASK, PROBE, PROBE_CONFIRMED, Lane, LaneSetup
from faultbed.traffic.node.ranks.parts_clock import COMPLETION, COPY, POST
from faultbed.traffic.node.ranks.segments import Segment
from faultbed.traffic.node.verbs import write_request

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from typing import Any

    import numpy.typing as npt

    from faultbed.traffic.node.task import Conn

__all__ = ["CONFIRM_ID", "PROBE_ID", "SendLane", "SprayLane"]

PROBE_ID = 1 << 60
CONFIRM_ID = 1 << 59
"""Work request ids of a probe and of its repetition with `PROBE_CONFIRMED`. A segment's id is its number."""
IN_FLIGHT = 2
"""Segments on each connection of a lane that has several: one is sent, one waits. A slow connection gets no more."""


class SendLane(Lane):
    """Sending end of a lane. Segments are read from the memory region `mr`, which begins at `address`.

    An eager lane has a ring: then the region is that of the `ring`.
    """

    direction = "out"

    def __init__(
        self,
        conn_numbers: list[int],
        peer: int,
        segments: list[Segment],
        setup: LaneSetup,
        *,
        mr: Any,
        address: int,
        ring: npt.NDArray[Any] | None = None,
    ) -> None:
        super().__init__(conn_numbers, peer, segments, IN_FLIGHT if len(conn_numbers) > 1 else setup.window, setup)
        self.slots = setup.slots
        self.segment_bytes = setup.segment_bytes
        self.mr = mr
        self.address = address
        self.ring = ring
        self.posted = 0  # segments, without repetitions
        self.requests = 0  # segments, with repetitions
        self.acked = 0  # all segments below this number are acknowledged
        self.peer_applied = 0  # all segments below this number are applied, by the peer's credits
        self.in_flight: dict[int, list[int]] = {number: [] for number in conn_numbers}  # segments by connection
        self.to_repeat: list[int] = []  # segments that were lost with their connection, in order
        self._acked_above: set[int] = set()
        self._write, self._sge = write_request(
            wr_id=0, mr=mr, address=address, size=self.item_bytes, imm=True, signalled=True
        )
        self._probe, _ = write_request(wr_id=PROBE_ID, mr=mr, address=address, size=0, imm=True, signalled=True)

    def load(self, conn: Conn) -> int:
        return len(self.in_flight[conn.number])

    def progress(self) -> tuple[int, int]:
        return self.posted, self.acked

    def done(self) -> int:
        return self.acked if self.ring is None else self.posted

    def copy(self, ring: npt.NDArray[Any], number: int, data: npt.NDArray[Any]) -> None:
        """Copy a segment of an eager lane from the rank's memory to its slot."""
        self.clock.enter(COPY)
        segment = self.segments[number % len(self.segments)]
        at = number % self.slots * (self.segment_bytes // self.item_bytes)
        ring[at : at + segment.size] = data[segment.offset : segment.offset + segment.size]

    def post(self, conn: Conn, number: int, flags: int, now_ns: int) -> None:
        """Post a segment on a connection, with `flags` in its immediate."""
        self.clock.enter(POST)
        index = number % len(self.segments)
        request, sge = self._write, self._sge
        slot = number % self.slots * self.segment_bytes
        sge.addr = self.address + (slot if self.ring is not None else self.segments[index].offset * self.item_bytes)
        sge.length = self.sizes_bytes[index]
        request.set_wr_rdma(conn.peer["rkey"], conn.peer["base"] + slot)
        request.imm_data = (number & MASK) | flags
        request.wr_id = number
        self.recorder.add_segment("post", self, conn, number, self.next_psn(conn, index))
        self.in_flight[conn.number].append(number)
        self.requests += 1
        conn.count_request(now_ns)
        conn.qp.post_send(request)
        self.clock.enter(COMPLETION)

    def acknowledge(self, conn: Conn, number: int) -> None:
        """Note the completion of a segment."""
        self.in_flight[conn.number].remove(number)
        self._note_acked(number)
        self.recorder.add_segment("ack", self, conn, number)

    def credit(self, value: int) -> None:
        """Note a credit. Credits on several connections may overtake each other: an older one is ignored."""
        more = (value - self.peer_applied) & MASK
        if more <= MASK >> 1:
            self.peer_applied += more

    def resume(self, conn: Conn) -> list[int]:
        """Continue on a rebuilt connection. Return the segments that were lost with it: they are posted again.

        The peer reports that it has all segments below `have`, and those of `above`.

        Raises:
            ValueError: the peer's report contradicts what was posted and acknowledged.
        """
        have, above = conn.peer["have"], conn.peer["above"]
        # Other connections of the lane may have carried more since the peer reported that.
        if have > self.posted or (have < self.acked and not self.has_substitutes):
            raise ValueError(
                f"peer reports {have} received segments, but {self.acked} of {self.posted} posted ones are acknowledged"
            )
        lost = []
        for number in self.in_flight[conn.number]:
            if number < have or number in above:
                self._note_acked(number)
            else:
                lost.append(number)
        self.in_flight[conn.number] = []
        self.to_repeat = sorted([*self.to_repeat, *lost])
        # A peer that was ready first may have sent more credits since.
        self.peer_applied = max(self.peer_applied, conn.peer["applied"])
        self.psns[conn.number] = conn.qp.psn
        self.recorder.add_segment("up", self, conn, have)
        return lost

    def _note_acked(self, number: int) -> None:
        self._acked_above.add(number)
        while self.acked in self._acked_above:
            self._acked_above.remove(self.acked)
            self.acked += 1

    def probe(self, conn: Conn, now_ns: int) -> None:
        """Test the path of a rebuilt connection with an empty write."""
        self._post_probe(conn, PROBE_ID, PROBE, now_ns)

    def confirm_probe(self, conn: Conn, now_ns: int) -> None:
        """Inform the receiver that the probe was acknowledged, by a second probe."""
        self._post_probe(conn, CONFIRM_ID, PROBE_CONFIRMED, now_ns)

    def _post_probe(self, conn: Conn, wr_id: int, imm: int, now_ns: int) -> None:
        self._probe.wr_id, self._probe.imm_data = wr_id, imm
        self._probe.set_wr_rdma(conn.peer["rkey"], conn.peer["base"])
        conn.count_request(now_ns)
        conn.qp.post_send(self._probe)
        self.psns[conn.number] = (self.psns[conn.number] + 1) & MASK


class SprayLane(SendLane):
    """Sending end of a lane whose connections take turns (`spray`)."""

    def free_connection(self) -> Conn | None:
        """Return the connection for the next segment, or None if it is at its limit."""
        usable = [conn for number in self.conn_numbers if (conn := self.usable(number)) is not None]
        if not usable:
            return None
        conn = usable[self.requests % len(usable)]
        return conn if self.load(conn) < self.limit else None
