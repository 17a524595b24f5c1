"""What a flow is and may be: its shape, pace and transport; what cannot be meant is refused in one sentence. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from testbed.errors import UsageError
from testbed.finite import require_finite
from traffic.engine.task_specs import QpParams, check_qp

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
"""What each transport carries here."""
CHECKED = {"rc": ("send", "write-imm", "read"), "uc": ("write", "send"), "ud": ("send",)}
"""Of which every byte can be checked: who looks must know when one has come, and a write over uc has an immediate."""
MAX_CHECKED_BYTES = 256 << 20
ATOMIC_BYTES = 8

MAX_QPS = 64
MAX_ENTROPY = 4096
CQ_ENTRIES = 32_767
"""Completion queue of an RNIC, as in `traffic.node.completions`."""
MAX_MESSAGE_BYTES = 1 << 30
CHAIN_BYTES = 256 * 1024
MAX_CHAIN = 32
MAX_DEPTH_BYTES = 8 << 20
LATE_DEPTH = 4
"""Of a flow whose receives are late: what is outstanding at its end takes a receive each to be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSpec:
    """Messages of `message_bytes` from `src` to `dst` (with `read`: from `dst` to `src`) on `qps` queue pairs.

    `verb` is write, write-imm (with immediate), send, read or atomic (fetch-and-add, 8 bytes). `spread` is how messages
    get on the QPs: each QP on its own, in turn, or every message split over all of them. `rate_bps` paces the payload
    (0: as fast as it goes); with `on_s` the flow is silent for `off_s` after every burst of `on_s`. `latency` times
    every message, from its posting to its completion, which makes it a probe when `depth` is 1.

    `transport` is rc, uc (writes and sends) or ud (sends of at most an MTU). Over the latter two nothing is
    acknowledged, sent again or held back: what came is counted by the receiver.

    With `echo` every datagram is answered by a process at the other end, and both ends keep its times
    (`traffic.probes.rtt`).

    With `entropy` the QPs of all such flows of a plan share so many flow labels, by turns, and with them UDP source
    ports: a low-entropy set, as training makes them, which ECMP cannot spread any wider. 0: each has the port that
    its QPNs give it. Labels count up from `qp.flow_label`, or 1.

    With `admit`, all flows to an RNIC that have it send a chain when its host grants them one, and at most `admit` of
    those are under way (`traffic.node.flows.admission`).

    With `late_receives_ms` the receiver of sends or writes with immediate is slow: there is one receive at a time,
    posted so long after the message before it came, and nobody tells the sender. Its RNIC meets RNR NAKs;
    `FlowResult.rnr` says what came of it. `qp.min_rnr_timer` is how long it waits after each, `qp.rnr_retry` how often
    (7: for ever, until `op_deadline_s`).

    With `check` every byte of every message is looked at: of send, write-imm and read over rc, of write and send over
    uc and of send over ud, in host memory. What is wrong makes the flow a failure; what does not come over the latter
    two is lost, and not wrong. It costs both ends their CPU, message by message; there sends have an immediate, and a
    writer waits for who looks (`traffic.node.flows.numbered`). A write over rc has no immediate: nobody at the other
    end knows when it has landed, and the next one may be there already.

    `memory` is host, or cuda: of the GPU that stands at the RNIC's place in its host, at both ends (rack labs only; not
    yet run on hardware).

    Give `duration_s` or `messages` (in all, over the QPs). `depth` is the number of outstanding messages a QP, `chain`
    how many are posted by one call with one completion at the end; 0 chooses both by message size.
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


def is_probe(spec: FlowSpec) -> bool:
    """Whether it is there for its times, not to move anything."""
    return spec.latency and spec.depth == 1


def check(spec: FlowSpec) -> None:
    """Refuse what cannot be meant.

    Raises:
        UsageError: in one sentence.
    """
    require_finite(spec)
    if spec.verb not in VERBS:
        raise UsageError(f'no verb "{spec.verb}"; there is {", ".join(VERBS)}')
    if spec.spread not in SPREADS:
        raise UsageError(f'no way "{spec.spread}" to spread messages over QPs; there is {", ".join(SPREADS)}')
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


def check_on(lab_kind: str, *, transport: str, qp: QpParams, entropy: int = 0) -> None:
    """Refuse what queue pairs of this transport cannot do on this kind of lab (soft, rack).

    The flow label of a datagram's address handle is its UDP source port on mlx5 (Linux 6.12, mlx5_ah_get_udp_sport in
    drivers/infiniband/hw/mlx5/ah.c; not yet run on hardware). On rxe it is in no packet: prepare4 in
    drivers/infiniband/sw/rxe/rxe_net.c takes the port that the QP has, which rxe_modify_qp in rxe_verbs.c sets by the
    label of the QP's own address handle, and a datagram QP has none.

    Raises:
        UsageError: in one sentence.
    """
    asked = f"flow_label={qp.flow_label}" if qp.flow_label else f"entropy {entropy}" if entropy else None
    if lab_kind == "soft" and transport == "ud" and asked:
        raise UsageError(
            "soft RoCE sends datagrams (ud) from the UDP source port that their queue pair was made with, and looks at "
            f"no flow label: {asked} is for rc and uc here; take more qps for more ways"
        )


def _check_transport(spec: FlowSpec) -> None:
    if spec.transport not in TRANSPORTS:
        raise UsageError(f'no transport "{spec.transport}"; there is {", ".join(TRANSPORTS)}')
    if spec.verb not in TRANSPORTS[spec.transport]:
        raise UsageError(f"{spec.transport} carries {' and '.join(TRANSPORTS[spec.transport])}, not {spec.verb}")
    if spec.admit < 0 or (spec.admit and (spec.transport != "rc" or spec.verb != "write" or spec.spread != "each")):
        raise UsageError("admission is for writes over rc, each QP on its own, and grants at least 1 chain at a time")
    if spec.admit and (spec.rate_bps or spec.on_s or spec.latency):
        raise UsageError(
            "an admitted flow sends when it is granted to: it has no rate, no bursts and no times of its own"
        )
    if spec.echo and (spec.transport != "ud" or spec.duration_s is None):
        raise UsageError("an echo is of datagrams (ud), for a duration: its end waits for the last answers")
    if spec.transport == "rc":
        return
    if spec.transport == "ud" and spec.message_bytes > spec.qp.mtu:
        raise UsageError(f"a datagram has at most the MTU of {spec.qp.mtu} bytes, got {spec.message_bytes}")
    if spec.latency or spec.spread == "split":
        raise UsageError(f"over {spec.transport} nobody knows when a message has come, nor which parts are of one")


def _check_qps(spec: FlowSpec) -> None:
    if not 1 <= spec.qps <= MAX_QPS:
        raise UsageError(f"a flow has 1 to {MAX_QPS} QPs, got {spec.qps}")
    if spec.messages is not None and spec.messages < spec.qps:
        raise UsageError(f"{spec.messages} messages cannot be spread over {spec.qps} QPs")
    if spec.depth < 0 or spec.chain < 0 or (spec.depth and spec.chain > spec.depth):
        raise UsageError(f"chain ({spec.chain}) cannot be longer than depth ({spec.depth}), nor either be negative")
    needed = spec.qps * requests_a_qp(shape(spec)[0])
    if needed > CQ_ENTRIES:
        raise UsageError(
            f"depth {spec.depth} on {spec.qps} QPs: up to {needed} requests complete at once when they die, and the "
            f"completion queue of an RNIC has {CQ_ENTRIES} entries; take a smaller depth or fewer QPs"
        )
    if not 0 <= spec.entropy <= MAX_ENTROPY:
        raise UsageError(f"QPs can share 1 to {MAX_ENTROPY} source ports (0: each its own), got entropy {spec.entropy}")
    check_qp(spec.qp)


def _check_memory(spec: FlowSpec) -> None:
    if spec.memory not in MEMORIES:
        raise UsageError(f'no memory "{spec.memory}"; there is {", ".join(MEMORIES)}')
    if spec.memory == "cuda" and (spec.transport != "rc" or spec.admit or spec.verb in ("send", "write-imm")):
        raise UsageError("memory of a GPU is for writes, reads and atomics over rc, without admission")


def _check_pace(spec: FlowSpec) -> None:
    if spec.spread == "split" and spec.message_bytes % spec.qps:
        raise UsageError(f"a message of {spec.message_bytes} bytes cannot be split evenly over {spec.qps} QPs")
    if spec.rate_bps < 0 or spec.on_s < 0 or spec.off_s < 0:
        raise UsageError("a flow's rate, on and off times cannot be negative")
    if (spec.on_s > 0) != (spec.off_s > 0):
        raise UsageError("a flow with bursts needs both, an on time and an off time")


def _check_late(spec: FlowSpec) -> None:
    if spec.late_receives_ms < 0:
        raise UsageError(f"receives cannot come before their time, got {spec.late_receives_ms:g} ms")
    if not spec.late_receives_ms:
        return
    if spec.transport != "rc" or spec.verb not in ("send", "write-imm"):
        raise UsageError("late receives are of send and write-imm over rc: only there is a sender told to wait")
    if spec.late_receives_ms >= spec.op_deadline_s * 1e3:
        raise UsageError(
            f"a receive every {spec.late_receives_ms:g} ms is later than the {spec.op_deadline_s:g} s in which a "
            "message has to be done"
        )


def _check_check(spec: FlowSpec) -> None:
    if not spec.check:
        return
    if spec.verb not in CHECKED[spec.transport] or spec.memory != "host" or spec.echo:
        of = ", ".join(f"{transport} ({', '.join(verbs)})" for transport, verbs in CHECKED.items())
        raise UsageError(f"bytes are checked of {of}, in host memory: who looks must know when a message has come")
    if spec.late_receives_ms or spec.chain > 1:
        raise UsageError("a flow that is checked goes message by message, and its receives are never late")
    needed = spec.qps * 2 * shape(spec)[0] * spec.message_bytes
    if needed > MAX_CHECKED_BYTES:
        raise UsageError(
            f"a checked flow has memory for each message under way: {needed} bytes, and {MAX_CHECKED_BYTES} are the "
            "most; take a smaller depth"
        )


def requests_a_qp(depth: int) -> int:
    """Return the most requests that are posted on either end of a QP: twice the depth, or what datagrams need."""
    return max(2 * depth, 256) + 32


def shape(spec: FlowSpec) -> tuple[int, int]:
    """Depth and chain length: several chains in flight, a chain short enough for 100 ms samples to mean something."""
    # A chain would be a burst, and one time for all.
    alone = spec.rate_bps or spec.on_s or spec.latency or spec.late_receives_ms or spec.check
    chain = spec.chain or (1 if alone else max(1, min(MAX_CHAIN, CHAIN_BYTES // spec.message_bytes)))
    deep = LATE_DEPTH if spec.late_receives_ms else max(4, min(128, MAX_DEPTH_BYTES // spec.message_bytes))
    depth = spec.depth or deep
    chain = min(chain, max(1, depth // 2))
    return depth // chain * chain, chain
