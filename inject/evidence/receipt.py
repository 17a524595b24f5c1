"""Receipts: what is known about a fault once it is over, and whether that proves it. Frozen data and pure functions.

A receipt is the element of `faults` in `verdict.json`. It has three parts, of measurements and not of requests:

    armed     the target's readback right after the change
    fired     how often it hit, first and last, and the independent counters that must move, or must not
    cleared   the target's readback after the revert

`Receipt.proved` decides the verdict: the hop or actuator counted hits AND an independent counter moved AND no
counter moved that must not AND the fault was on as long as planned (`faultbed.inject.evidence.firing_times`) AND it is
cleared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from faultbed.inject.evidence import firing_times
from faultbed.inject.evidence.firing_times import OnTime
from faultbed.inject.evidence.observation import Observation
from faultbed.inject.evidence.reboots import COUNTER as REBOOTS
from faultbed.inject.evidence.workload_use import Exposure
from faultbed.inject.kinds.kind import Fidelity
from faultbed.testbed.observe.counters import Snapshot, flat_deltas, value_at, why_reset

if TYPE_CHECKING:
    from faultbed.inject.mechanisms.planned_fault import PlannedFault

__all__ = ["Armed", "Cleared", "Fired", "Receipt", "concluded", "end_sentence", "judge_fired", "not_cleared"]


class Armed(msgspec.Struct, frozen=True, kw_only=True):
    """The change, read back. `at_ns` is controller time, wrong by at most `clock_error_ns`.

    `learned` are values that were bound when the fault was armed (QP, PSN). `while_on` are states that were read
    independently of the holder while the fault was on.
    """

    ok: bool = False
    at_ns: int | None = None
    clock_error_ns: int | None = None
    readback: Any = {}
    learned: dict[str, int] = {}
    while_on: dict[str, int | None] = {}
    error: str | None = None


class Fired(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The effects of a fault.

    `count` is the actuator's own; `witness` names the first independent counter that moved enough.
    `must_move` and `must_not_move` are the counters' increments since just before arming; of each group of `must_move`
    one counter is enough. None: it was not read, or was reset meanwhile, so that its increment is unknown. Times are
    controller time. Their resolution is the holder's polling period: 20 ms at the hop, 50 ms for a cgroup, longer if a
    poll is slow (at most 5 % of the time is spent polling); edges are exact.
    `between_ns` are two moments between which it fired first, including the clock error; None: it never fired.
    `passed` is the number of packets from which a share, or every n-th, was taken; None: the fault selects none.
    `selection` says how the seed decided which packets were taken; None: nothing was drawn.
    `loss_unknown_why` is the reason why nothing shows whether something else ended the fault before it was removed;
    None: its holder checked that. Its name in files is `unseen`.
    """

    count: int
    first_ns: int | None
    last_ns: int | None
    witness: str | None
    must_move: Mapping[str, float | int | None]
    must_not_move: Mapping[str, float | int | None]
    between_ns: tuple[int, int] | None = None
    passed: int | None = None
    selection: str | None = None
    loss_unknown_why: str | None = msgspec.field(default=None, name="unseen")


class Cleared(msgspec.Struct, frozen=True, kw_only=True):
    """The revert, read back. `at_ns` is controller time, wrong by at most `clock_error_ns`.

    `by` is `holder`, or `lease` if the target reverted by itself after it lost the controller. `restored` are the
    states that were read after the revert.
    """

    ok: bool = False
    at_ns: int | None = None
    clock_error_ns: int | None = None
    by: str = "holder"
    readback: Any = {}
    restored: dict[str, int | None] = {}
    error: str | None = None


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """One fault, from beginning to end. `concluded` completes it.

    Attributes:
        id: the name of the fault in its experiment; of a fault without one, that of its plan.
        edges: (controller time in ns, on) of every change.
        exposed: what workloads used meanwhile (`faultbed.inject.evidence.exposure`).
        on_time: how long it was on; None: no changes were read.
        doubts: why the injector does not believe that the fault happened (`judge_fired`).
        unproven: every reason why the receipt does not prove the fault; empty: it does. In `verdict.json` it includes
            what the workload did.
    """

    id: str
    kind: str
    target: str
    fidelity: Fidelity
    armed: Armed
    fired: Fired
    exposed: Exposure = Exposure()
    cleared: Cleared
    on_time: OnTime | None = None
    edges: tuple[tuple[int, bool], ...] = ()
    doubts: tuple[str, ...] = ()
    unproven: tuple[str, ...] = ()

    @property
    def proved(self) -> bool:
        """Whether the fault provably happened, where it should and nowhere else, as long as planned, and is cleared."""
        return not self.unproven

    def to_json(self) -> dict[str, Any]:
        """Return the element of `faults` in `verdict.json`."""
        element: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return element


def concluded(receipt: Receipt, doubts: Iterable[str]) -> Receipt:
    """Return a receipt with all doubts of the injector, and with every reason why it does not prove its fault.

    What workloads did meanwhile is not considered.
    """
    doubts = tuple(doubts)
    reasons = [*doubts]
    if receipt.on_time is not None and receipt.armed.ok and receipt.fired.count:
        reasons += firing_times.why_not_as_planned(receipt.on_time)
    if not receipt.cleared.ok:
        reasons.append(f"not cleared: {receipt.cleared.error or 'the readback still shows the change'}")
    return msgspec.structs.replace(receipt, doubts=doubts, unproven=tuple(reasons))


def not_cleared(receipts: Iterable[Receipt]) -> tuple[str, ...]:
    """Return one sentence for each fault that may still be in place; each of them makes the lab DIRTY."""
    return tuple(
        f"{receipt.kind} on {receipt.target} is not cleared: {receipt.cleared.error or 'the readback does not show it'}"
        for receipt in receipts
        if not receipt.cleared.ok
    )


def end_sentence(receipts: Sequence[Receipt], abandoned: Sequence[str], *, ttl_s: float) -> str:
    """Return how faults ended, as far as was observed: `2 faults cleared and verified`; empty without any fault."""
    cleared = sum(receipt.cleared.ok for receipt in receipts)
    parts = [f"{cleared} {'fault' if cleared == 1 else 'faults'} cleared and verified"] if cleared else []
    parts += not_cleared(receipts)
    parts += [f"{fault} reverts when its lease of {ttl_s:g} s expires" for fault in abandoned]
    return "; ".join(parts)


def judge_fired(
    planned: PlannedFault,
    *,
    armed: Armed,
    observed: Observation,
    before: Snapshot,
    after: Snapshot,
) -> tuple[Fired, tuple[str, ...]]:
    """Compare the actuator's count with the independent counters.

    Args:
        planned: the fault as planned.
        armed: the result of arming.
        observed: the holder's last observation, in controller time.
        before: counters just before arming; empty: they were not read.
        after: counters after clearing, settled.

    Returns:
        What fired, and every reason to doubt that the fault happened as planned (none: it is proved).
    """
    deltas = flat_deltas(before, after)
    own = dict.fromkeys(key for witness in planned.mechanism.must_move for key in witness.any_of)
    # A counter that was reset, or read only after the fault, is listed without an increment and proves nothing.
    lost = dict(_lost_witnesses(planned, own, before, after))
    moved = {
        key: None if key in lost else deltas.get(key)
        for key in own
        if key in deltas or value_at(after, key) is not None
    }
    unknown = dict(_unknown_bystanders(planned, before, after))
    stayed = {key: None if key in unknown else deltas.get(key) for key in planned.mechanism.must_not_move}
    count, passed = observed.count or 0, observed.passed
    is_complete = planned.mechanism.complete_after is not None and count >= planned.mechanism.complete_after
    doubts = (
        *_doubts_of_arming(planned, armed),
        *_doubts_of_states_before(planned, before),
        *(() if count else ("the actuator counted nothing",)),
        *_doubts_of_witnesses(planned, moved, lost, was_read=bool(before)),
        *(f"{key} moved by {delta}, and must not move" for key, delta in stayed.items() if delta),
        # If the fault was not armed, no counter was read before it: one doubt says so, instead of one for each counter.
        *(unknown.values() if before or not unknown else ("no counter was read before the fault",)),
        *(() if is_complete else _doubts_of_loss(observed)),
        *_doubts_of_share(planned, count, passed),
    )
    fired = Fired(
        count=count,
        first_ns=observed.first_ns,
        last_ns=observed.last_ns,
        between_ns=observed.between_ns,
        witness=next(_witnesses_that_show(planned, armed, moved), None),
        must_move=moved,
        must_not_move=stayed,
        passed=passed,
        selection=str(planned.mechanism.selection) if planned.mechanism.selection else None,
        loss_unknown_why=None if is_complete else observed.unseen,
    )
    return fired, doubts


_Increments = Mapping[str, float | int | None]


def _witnesses_that_show(planned: PlannedFault, armed: Armed, moved: _Increments) -> Iterator[str]:
    """Yield the independent counters that moved enough, then the states that were as planned while the fault was on."""
    for witness in planned.mechanism.must_move:
        yield from (key for key in witness.any_of if (moved.get(key) or 0) >= witness.at_least)
    yield from (
        key for key, value in planned.mechanism.while_on if key in armed.while_on and armed.while_on[key] == value
    )


def _doubts_of_witnesses(
    planned: PlannedFault, moved: _Increments, lost: Mapping[str, str], *, was_read: bool
) -> Iterator[str]:
    """Yield a doubt for each witness of which no counter moved enough.

    `lost` has the reason why a counter was reset. `was_read` says whether counters were read before the fault; an
    increment of None is then one that is unknown.
    """
    for witness in planned.mechanism.must_move:
        best = max((moved.get(key) or 0 for key in witness.any_of), default=0)
        if best >= witness.at_least:
            continue
        names = ", ".join(witness.any_of[:3]) + (", ..." if len(witness.any_of) > 3 else "")  # noqa: PLR2004
        unread = next((key for key in witness.any_of if was_read and key in moved and moved[key] is None), None)
        reason = lost.get(unread, f"{unread} was not read before the fault") if unread is not None else ""
        why = f"; {reason}: its increment is unknown" if reason else ""
        yield f"no independent witness: {names} moved by {best}, at least {witness.at_least} is required{why}"


def _doubts_of_loss(observed: Observation) -> Iterator[str]:
    """Yield why something other than the holder may have ended the fault; nothing if it was on until its removal."""
    if observed.lost:
        yield "something else removed it early: its holder saw that it was no longer on"
    elif observed.unread:
        yield f"its state could not be read just before it was removed: {observed.unread}"


def _lost_witnesses(
    planned: PlannedFault, keys: Iterable[str], before: Snapshot, after: Snapshot
) -> Iterator[tuple[str, str]]:
    """Yield each witness that was reset by something else than its fault, with the reason.

    Its value after a reset need not begin at 0: an interface that is made anew has changed its carrier already.
    """
    removed = _removed_devices(planned)
    for key in keys:
        was, now = value_at(before, key), value_at(after, key)
        if was is None or now is None or key.endswith(f"/{REBOOTS}"):
            continue
        if (now < was or key.rpartition(".")[0] not in removed) and (reset := why_reset(before, after, key)):
            yield key, f"{key} {reset}"


def _removed_devices(planned: PlannedFault) -> set[str]:
    """Return the devices that the fault itself removes, which resets their counters."""
    return {key.rpartition(".")[0] for key, value in planned.mechanism.while_on if value is None}


def _unknown_bystanders(planned: PlannedFault, before: Snapshot, after: Snapshot) -> Iterator[tuple[str, str]]:
    """Yield each counter that must not move but may have moved unseen, with the reason.

    A counter of a device that the fault itself removes is not listed: the removal resets it.
    """
    removed = _removed_devices(planned)
    for key in planned.mechanism.must_not_move:
        was, now = value_at(before, key), value_at(after, key)
        if now is None:
            how = "could not be read, neither before the fault nor after it" if was is None else "can no longer be read"
            yield key, f"{key} {how}"
        elif was is None:
            yield key, f"{key} was not read before the fault: whether it moved is unknown"
        elif key.rpartition(".")[0] not in removed and (reset := why_reset(before, after, key)):
            yield key, f"{key} {reset}: whether it moved before that is unknown"


def _doubts_of_arming(planned: PlannedFault, armed: Armed) -> list[str]:
    """Return why the readback is not the planned change at its planned place; empty if it is."""
    if not armed.ok:
        return [f"not armed: {armed.error or 'the readback does not show the change'}"]
    elsewhere = [
        f"armed elsewhere: {key} reads back as {armed.readback.get(key)}, planned was {value}"
        for key, value in planned.mechanism.shows.items()
        if armed.readback.get(key) not in (value, [value])
    ]
    late = "could not be read before the fault was over; lengthen its window"
    return elsewhere + [
        f"{key} was {armed.while_on[key]} while the fault was on, planned was {value}"
        if key in armed.while_on
        else f"{key} {late}"
        for key, value in planned.mechanism.while_on
        if key not in armed.while_on or armed.while_on[key] != value
    ]


def _doubts_of_states_before(planned: PlannedFault, before: Snapshot) -> list[str]:
    """Name each state that held before the fault already: reading it while the fault is on proves nothing.

    Faults of a workload are exempt, because its processes may not have started by then, and so are things that the
    fault removes.
    """
    if planned.mechanism.of_workload:
        return []
    return [
        f"{key} was already {value} before the fault, so it proves nothing"
        for key, value in planned.mechanism.while_on
        if value is not None and value_at(before, key) == value
    ]


def _doubts_of_share(planned: PlannedFault, count: int, passed: int | None) -> list[str]:
    """Compare the number of packets hit with the number that the plan selects among those that passed."""
    if passed is None:
        return []
    if (every := planned.spec.params.get("every")) is not None:
        expected = passed // every
    elif planned.mechanism.selection is not None and planned.mechanism.selection.period:
        expected = planned.mechanism.selection.selected_among(passed)
    else:
        return []
    if abs(count - expected) <= 1:  # a packet may be between the two counters
        return []
    return [f"{count} of {passed} packets were hit, planned were {expected} ± 1"]
