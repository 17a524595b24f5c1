"""Specification of a flow: its size, rate and transport, and the validation of each. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from faultbed.testbed.errors import UsageError
from faultbed.testbed.finite import require_finite
from faultbed.testbed.model.lab_kind import LabKind, traits_of
from faultbed.traffic.engine.task_specs import QpParams, check_entropy, check_qp
from faultbed.traffic.node.completions import CQ_ENTRIES

__all__ = [
    "ATOMIC_BYTES",
    "CHECKED",
    "MEMORIES",
    "SPREADS",
    "TRANSPORTS",
    "VERBS",
    "FlowSpec",
    "check",
    "check_on",
    "is_probe",
    "shape",
]

VERBS = ("write", "send", "read", "atomic", "write-imm")
MEMORIES = ("host", "cuda")
SPREADS = ("each", "round-robin", "split")
TRANSPORTS = {"rc": VERBS, "uc": ("write", "send"), "ud": ("send",)}
"""Verbs that each transport supports here."""
CHECKED = {"rc": ("send", "write-imm", "read"), "uc": ("write", "send"), "ud": ("send",)}
"""Verbs whose bytes can be verified. The receiver must know when a message has arrived; a write over uc carries an
immediate for that."""
MAX_CHECKED_BYTES = 256 << 20
ATOMIC_BYTES = 8

MAX_QPS = 64
MAX_MESSAGE_BYTES = 1 << 30
CHAIN_BYTES = 256 * 1024
MAX_CHAIN = 32
MAX_DEPTH_BYTES = 8 << 20
LATE_DEPTH = 4
"""Depth of a flow with late receives: each message outstanding at its end still needs a receive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSpec:
    """Messages of `message_bytes` from `src` to `dst` (with `read`: from `dst` to `src`) on `qps` queue pairs.

    `verb` is write, write-imm (with immediate), send, read or atomic (fetch-and-add, 8 bytes). `spread` distributes
    messages over the QPs: each QP has its own, the QPs take turns, or every message is split over all of them.
    `rate_bps` paces the payload (0: unlimited); with `on_s` the flow is silent for `off_s` after every burst of `on_s`.
    `latency` times every message from posting to completion, which makes the flow a latency probe if `depth` is 1.

    `transport` is rc, uc (writes and sends) or ud (sends of at most one MTU). Over uc and ud nothing is acknowledged,
    retransmitted or flow-controlled, and the receiver counts what arrives.

    With `echo` a process at the other end answers every datagram, and both ends record its times
    (`faultbed.traffic.probes.rtt`).

    With `entropy` the QPs of all such flows of a plan share that many flow labels in turn, and therefore that many UDP
    source ports. Training traffic has such low entropy, which ECMP cannot spread any wider. 0: each QP has the port
    that follows from its QPNs. Labels count up from `qp.flow_label`, or 1.

    With `admit`, all flows with that option to an RNIC send a chain only when its host grants them one. At most `admit`
    of those chains are in flight (`faultbed.traffic.node.flows.admission`).

    With `late_receives_ms` the receiver of sends or writes with immediate is slow: one receive at a time is posted,
    that long after the previous message arrived, and the sender gets no credits. Its RNIC meets RNR NAKs, and
    `FlowResult.rnr` reports the outcome. `qp.min_rnr_timer` is the wait after each NAK, `qp.rnr_retry` the number of
    retries (7: forever, until `op_deadline_s`).

    With `check` every byte of every message is verified: of send, write-imm and read over rc, of write and send over
    uc, and of send over ud; in GPU memory by the host and on the GPU. Wrong bytes make the flow a failure. Messages
    that do not arrive over uc or ud count as lost, not as wrong. The check costs CPU time at both ends for every
    message. Over uc and ud, sends then carry an immediate, and a sender of writes waits for the receiver's check
    (`faultbed.traffic.node.flows.numbered`). A write over rc cannot be checked: it has no immediate, so the receiver
    does not know when it has arrived, and the next write may overwrite it.

    `memory` is host, or cuda: the memory of the GPU at the same position in its host as the RNIC, at both ends (rack
    labs only; not yet run on hardware).

    Give `duration_s` or `messages` (in total, over all QPs). `depth` is the number of outstanding messages per QP.
    `chain` is how many messages are posted by one call with one completion at the end. 0 chooses both by message size.
    """

    src: str
    dst: str
    message_bytes: int = 65536
    verb: str = "write"
    transport: str = "rc"
    qps: int = 1
    spread: str = "each"
    entropy: int = 0
    admit: int = 0
    memory: str = "host"
    rate_bps: float = 0.0
    on_s: float = 0.0
    off_s: float = 0.0
    latency: bool = False
    late_receives_ms: float = 0.0
    check: bool = False
    echo: bool = False
    duration_s: float | None = None
    messages: int | None = None
    depth: int = 0
    chain: int = 0
    qp: QpParams = field(default_factory=QpParams)
    op_deadline_s: float = 10.0
    peer_deadline_s: float = 30.0
    stall_deadline_s: float = 60.0

    @property
    def part_bytes(self) -> int:
        """Bytes of a message on one queue pair: a part of it if `spread` is split, else all of it."""
        return self.message_bytes // self.qps if self.spread == "split" else self.message_bytes


def is_probe(spec: FlowSpec) -> bool:
    """Return whether the flow only measures latency."""
    return spec.latency and spec.depth == 1


def check(spec: FlowSpec) -> None:
    """Reject a spec that is invalid on every lab.

    Raises:
        UsageError: a value is invalid; the message names it.
    """
    require_finite(spec)
    if spec.verb not in VERBS:
        raise UsageError(f'no verb "{spec.verb}"; choose one of {", ".join(VERBS)}')
    if spec.spread not in SPREADS:
        raise UsageError(f'no spread "{spec.spread}" of messages over QPs; choose one of {", ".join(SPREADS)}')
    _check_transport(spec)
    if spec.verb == "atomic" and spec.message_bytes != ATOMIC_BYTES:
        raise UsageError(f"an atomic has {ATOMIC_BYTES} bytes, got {spec.message_bytes}")
    if not 0 < spec.message_bytes <= MAX_MESSAGE_BYTES:
        raise UsageError(f"message size must be 1 byte to {MAX_MESSAGE_BYTES} bytes, got {spec.message_bytes}")
    if (spec.duration_s is None) == (spec.messages is None):
        raise UsageError("give a flow either a duration or a number of messages")
    if spec.duration_s is not None and spec.duration_s <= 0:
        raise UsageError(f"a flow's duration must be above 0 s, got {spec.duration_s:g} s")
    _check_qps(spec)
    _check_memory(spec)
    _check_pace(spec)
    _check_late(spec)
    _check_check(spec)


def check_on(lab_kind: LabKind, *, transport: str, qp: QpParams, entropy: int = 0) -> None:
    """Reject options that queue pairs of this transport do not support on this kind of lab (soft, rack).

    On mlx5 the flow label of a datagram's address handle selects its UDP source port (Linux 6.12, mlx5_ah_get_udp_sport
    in drivers/infiniband/hw/mlx5/ah.c; not yet run on hardware). On rxe the label has no effect on datagrams: prepare4
    in drivers/infiniband/sw/rxe/rxe_net.c uses the port of the QP. rxe_modify_qp in rxe_verbs.c sets that port from the
    label of the QP's own address handle, and a datagram QP has none.

    Raises:
        UsageError: the option has no effect on this kind of lab.
    """
    option = f"flow_label={qp.flow_label}" if qp.flow_label else f"entropy {entropy}" if entropy else None
    if traits_of(lab_kind).is_emulated and transport == "ud" and option:
        raise UsageError(
            "soft RoCE sends datagrams (ud) from the UDP source port that their queue pair was created with, and "
            f"ignores flow labels: {option} is for rc and uc here; use more qps for more paths"
        )


def _check_transport(spec: FlowSpec) -> None:
    if spec.transport not in TRANSPORTS:
        raise UsageError(f'no transport "{spec.transport}"; choose one of {", ".join(TRANSPORTS)}')
    if spec.verb not in TRANSPORTS[spec.transport]:
        raise UsageError(f"{spec.transport} carries {' and '.join(TRANSPORTS[spec.transport])}, not {spec.verb}")
    if spec.admit < 0 or (spec.admit and (spec.transport != "rc" or spec.verb != "write" or spec.spread != "each")):
        raise UsageError("admission needs writes over rc with spread each, and at least 1 grant")
    if spec.admit and (spec.rate_bps or spec.on_s or spec.latency):
        raise UsageError("an admitted flow sends when it gets a grant; it cannot have a rate, bursts or latency")
    if spec.echo and (spec.transport != "ud" or spec.duration_s is None):
        raise UsageError(
            "an echo needs datagrams (ud) and a duration, because the flow waits for the last answers at its end"
        )
    if spec.transport == "rc":
        return
    if spec.transport == "ud" and spec.message_bytes > spec.qp.mtu:
        raise UsageError(f"a datagram has at most {spec.qp.mtu} bytes (the MTU), got {spec.message_bytes}")
    if spec.latency or spec.spread == "split":
        raise UsageError(f"over {spec.transport} arrivals are not acknowledged; leave out latency and spread split")


def _check_qps(spec: FlowSpec) -> None:
    if not 1 <= spec.qps <= MAX_QPS:
        raise UsageError(f"a flow has 1 to {MAX_QPS} QPs, got {spec.qps}")
    if spec.messages is not None and spec.messages < spec.qps:
        raise UsageError(f"{spec.messages} messages cannot be spread over {spec.qps} QPs")
    if spec.depth < 0 or spec.chain < 0 or (spec.depth and spec.chain > spec.depth):
        raise UsageError(f"chain ({spec.chain}) must be 0 to depth ({spec.depth}), and depth at least 0")
    needed = spec.qps * requests_a_qp(shape(spec)[0])
    if needed > CQ_ENTRIES:
        raise UsageError(
            f"depth {spec.depth} on {spec.qps} QPs: up to {needed} requests complete at once if the QPs fail, and the "
            f"completion queue of an RNIC has {CQ_ENTRIES} entries; use a smaller depth or fewer QPs"
        )
    check_entropy(spec.entropy)
    check_qp(spec.qp)


def _check_memory(spec: FlowSpec) -> None:
    if spec.memory not in MEMORIES:
        raise UsageError(f'no memory "{spec.memory}"; choose one of {", ".join(MEMORIES)}')
    if spec.memory == "cuda" and (spec.transport != "rc" or spec.admit or spec.verb == "send"):
        raise UsageError("GPU memory supports writes, reads and atomics over rc, without admission")


def _check_pace(spec: FlowSpec) -> None:
    if spec.spread == "split" and spec.message_bytes % spec.qps:
        raise UsageError(f"a message of {spec.message_bytes} bytes cannot be split evenly over {spec.qps} QPs")
    if spec.rate_bps < 0 or spec.on_s < 0 or spec.off_s < 0:
        raise UsageError("a flow's rate, on and off times cannot be negative")
    if (spec.on_s > 0) != (spec.off_s > 0):
        raise UsageError("a flow with bursts needs both, an on time and an off time")


def _check_late(spec: FlowSpec) -> None:
    if spec.late_receives_ms < 0:
        raise UsageError(f"late_receives_ms cannot be negative, got {spec.late_receives_ms:g} ms")
    if not spec.late_receives_ms:
        return
    if spec.transport != "rc" or spec.verb not in ("send", "write-imm"):
        raise UsageError("late receives need send or write-imm over rc: only there does a receiver send RNR NAKs")
    if spec.late_receives_ms >= spec.op_deadline_s * 1e3:
        raise UsageError(
            f"a receive every {spec.late_receives_ms:g} ms exceeds the operation deadline of {spec.op_deadline_s:g} s; "
            "use a shorter delay or a longer deadline"
        )


def _check_check(spec: FlowSpec) -> None:
    if not spec.check:
        return
    if spec.verb not in CHECKED[spec.transport] or spec.echo:
        of = ", ".join(f"{transport} ({', '.join(verbs)})" for transport, verbs in CHECKED.items())
        raise UsageError(f"bytes can be checked for {of}: the receiver must know when a message has arrived")
    if spec.late_receives_ms or spec.chain > 1:
        raise UsageError("a checked flow cannot have late receives or chains longer than 1")
    needed = spec.qps * 2 * shape(spec)[0] * spec.message_bytes
    if needed > MAX_CHECKED_BYTES:
        raise UsageError(
            f"a checked flow needs memory for each message in flight: {needed} bytes, limit {MAX_CHECKED_BYTES}; "
            "use a smaller depth"
        )


def requests_a_qp(depth: int) -> int:
    """Return the maximum number of requests posted on either end of a QP: twice the depth, or what datagrams need."""
    return max(2 * depth, 256) + 32


def shape(spec: FlowSpec) -> tuple[int, int]:
    """Return depth and chain length: several chains in flight, and chains short enough for 100 ms samples."""
    # With a rate, latency, late receives or a check, a chain would be one burst with one time for all its messages.
    single = spec.rate_bps or spec.on_s or spec.latency or spec.late_receives_ms or spec.check
    chain = spec.chain or (1 if single else max(1, min(MAX_CHAIN, CHAIN_BYTES // spec.message_bytes)))
    default_depth = LATE_DEPTH if spec.late_receives_ms else max(4, min(128, MAX_DEPTH_BYTES // spec.message_bytes))
    depth = spec.depth or default_depth
    chain = min(chain, max(1, depth // 2))
    return depth // chain * chain, chain
