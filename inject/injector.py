"""The injector of one run: prepares planned faults, arms and clears them, and collects their receipts.

The injector does not guarantee the revert: its heartbeats keep the lease alive, and the target reverts when they stop.
It adds exact timing, the comparison with independent counters, and an orderly end. Leaving the `with` block clears
every fault; if even that is interrupted, closing the channels ends the leases.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from faultbed.inject.evidence.receipt import Receipt, end_sentence, not_cleared
from faultbed.inject.evidence.workload_use import WorkloadUse
from faultbed.inject.leases.channels import last_heal
from faultbed.inject.leases.claim_request import claim_of
from faultbed.inject.leases.other_commands import FaultsOfOthers
from faultbed.inject.policy import blast_radius, safety
from faultbed.inject.policy.conflicts import claims_of
from faultbed.inject.policy.overlap import TAIL_S
from faultbed.inject.prepared_fault import PreparedFault
from faultbed.testbed import stopping
from faultbed.testbed.errors import FaultError, RevertFailed
from faultbed.testbed.side_by_side import on_each
from faultbed.testbed.tenancy import audit_log, interventions
from faultbed.testbed.tenancy.lab_lease import this_process

if TYPE_CHECKING:
    from faultbed.inject.journal import Journal
    from faultbed.inject.leases.lease import Lease
    from faultbed.inject.mechanisms.planned_fault import PlannedFault
    from faultbed.testbed.lab import Lab

__all__ = ["TTL_S", "Injector", "Mutation", "audit_fields", "longest_lease_s"]

TTL_S = 10.0
"""How long a target keeps a fault without hearing from its controller."""

CLEAR_ALL_S = 1800.0
"""Deadline for clearing all faults. Each has its own, and one that lets a host boot may take 15 minutes."""

Mutation = Literal["noop", "lie"]
"""`noop` makes a holder do nothing; `lie` also makes it report success. Only for tests of the harness."""


def longest_lease_s(faults: Iterable[PlannedFault], *, ttl_s: float = TTL_S) -> float:
    """Return how long after the controller's death the last of these faults may still be in place."""
    return ttl_s + max((float(fault.request.get("patience_s", 0.0)) for fault in faults), default=0.0)


def audit_fields(planned: PlannedFault) -> dict[str, Any]:
    """Return a fault's fields of an audit record: what changes, where, and how it is undone."""
    return {
        "kind": planned.kind,
        "target": planned.target.text,
        "id": planned.id,
        "place": planned.place.node,
        "for_s": planned.spec.for_s,
        "params": dict(planned.spec.params),
        "do": [step.do for step in planned.mechanism.steps],
        "revert": [step.undo for step in planned.mechanism.steps],
    }


class Injector:
    """The faults of one lab in one run. Use as a context manager: its end clears every fault that is still there.

    Args:
        lab: the lab.
        journal: records every change before it is made.
        ttl_s: how long a target keeps a fault without hearing from the controller.
        mutate: makes every holder misbehave, for tests of the harness itself.
        confirmed: kinds without a revert that the user has confirmed for this run.
        until_cleared: the window of a fault ends when the fault is cleared, after `for_s` at the latest: for tests,
            which clear a fault once they have measured its effect.
    """

    def __init__(
        self,
        lab: Lab,
        journal: Journal,
        *,
        ttl_s: float = TTL_S,
        mutate: Mutation | None = None,
        confirmed: Collection[str] = (),
        until_cleared: bool = False,
    ) -> None:
        self.lab = lab
        self.journal = journal
        self.ttl_s = ttl_s
        self.mutate = mutate
        self.confirmed = confirmed
        self.until_cleared = until_cleared
        self.receipts: tuple[Receipt, ...] = ()
        """Receipts of every fault that was cleared, or should have been."""
        self.abandoned: tuple[str, ...] = ()
        """Faults whose end was not observed; their targets revert by themselves when the lease expires."""
        self.use_of: Callable[[PlannedFault], WorkloadUse | None] | None = None
        """Returns what workloads use now, as far as it concerns a fault; its None: there is no workload now."""
        self._open: list[PreparedFault] = []
        self._all: list[PreparedFault] = []
        self._ended: tuple[PlannedFault, float] | None = None
        """The armed fault that ended last, and when (time.monotonic)."""
        self._opening = threading.Lock()
        self._removing = threading.Lock()
        self._is_closed = False
        self._idle: list[Lease] = []
        """Leases of holders that have reverted and are kept until the end (`keep_idle`)."""
        self._session = secrets.token_hex(8)
        self._others = FaultsOfOthers(lab, session=self._session)
        """Processes of other commands that were dead when this injector began."""

    def prepare(
        self, planned: PlannedFault, *, later: bool = False, until_cleared: bool | None = None
    ) -> PreparedFault:
        """Start a fault's holder on the target, and let it check capability, ownership and the revert. Nothing changes.

        With `later`, a fault of a workload checks its target in `PreparedFault.prepare_target` or when it is armed: the
        processes that it changes may not exist yet. A fault whose target is chosen by what the workload uses always
        does. `until_cleared` overrides the injector's setting for this fault.

        Raises:
            Forbidden: the lab's policy does not allow it, alone or together with the faults that are active.
            FaultError: the target refuses; the message says why.
            Unreachable: the target does not answer.
        """
        prepared = PreparedFault(self, planned)
        prepared.until_cleared = self.until_cleared if until_cleared is None else until_cleared
        try:
            safety.check(planned, self.lab.inventory_model, confirmed=self.confirmed)
            with self._opening:
                if self._is_closed:
                    raise FaultError(
                        f"{planned.kind} on {planned.target.text}: not started, because this command is ending"
                    )
                active = [*(open_fault.planned for open_fault in self._open), planned]
                blast_radius.check(active, self.lab.inventory_model)
                safety.check_spacing(active, self.lab.inventory_model)
                self._check_last_end(planned)
                self._open.append(prepared)
                self._all.append(prepared)
        except safety.Forbidden as error:
            self.audit("forbidden", planned, detail=str(error))
            raise
        try:
            prepared.last_heal = last_heal(self.lab)
            self.refuse_after_intervention(planned)
            with self.journal.doing("prepare", fault=planned.id, plan=planned.to_json()) as outcome:
                prepared.lease.begin()
                if not planned.candidates and not (later and planned.mechanism.of_workload):
                    outcome["before"] = prepared.prepare_target()
        except BaseException as error:
            self.remove(prepared)
            prepared.lease.release()
            self.audit("not prepared", planned, detail=audit_log.error_text(error))
            raise
        return prepared

    @property
    def not_cleared(self) -> tuple[str, ...]:
        """One sentence for each fault that may still be in place; each of them makes the lab DIRTY."""
        unobserved = (
            f"{fault}: its end was not observed; its target reverts it when the lease expires"
            for fault in self.abandoned
        )
        return (*not_cleared(self.receipts), *unobserved)

    def _check_last_end(self, planned: PlannedFault) -> None:
        """Refuse a fault that would begin too soon after the last one cleared, by this injector or another command."""
        least_s = safety.policy_of(self.lab.inventory_model).min_spacing_s
        if not least_s > 0:
            return
        ends = []
        if self._ended is not None:
            fault, ended_s = self._ended
            ends.append((time.monotonic() - ended_s, f"{fault.kind} on {fault.target.text}"))
        if (last := audit_log.last_fault(self.lab.state_dir)) is not None:
            ends.append((last.ago_s, f"{last.kind} on {last.target}"))
        for ago_s, earlier in ends:
            if (apart_s := ago_s + planned.spec.at_s) < least_s:
                safety.refuse_spacing(earlier, planned, apart_s, self.lab.inventory_model)

    @property
    def end_sentence(self) -> str:
        """How the faults ended, as far as that was observed; empty until one has ended."""
        return end_sentence(self.receipts, self.abandoned, ttl_s=self.ttl_s)

    def audit(self, event: str, planned: PlannedFault, **more: Any) -> None:
        """Record in the lab's audit log what has been done, and how it is undone. A failure to write is ignored."""
        audit_log.try_to_append(self.lab.state_dir, event, **self._audit_fields(planned), **more)

    def audit_change(self, event: str, planned: PlannedFault) -> None:
        """Record in the lab's audit log what is about to be done.

        Raises:
            FaultError: the record cannot be written, so the change must not be made.
        """
        audit_log.append_before_change(self.lab.state_dir, event, **self._audit_fields(planned))

    def _audit_fields(self, planned: PlannedFault) -> dict[str, Any]:
        return audit_fields(planned) | {"session": self._session, "process": this_process()}

    def refuse_after_intervention(self, planned: PlannedFault) -> None:
        """Refuse a fault if a `heal`, `reset` or `down` in another shell has ended the lab's faults meanwhile.

        Raises:
            FaultError: another command has ended them; the message names it.
        """
        try:
            interventions.refuse(self.lab.state_dir, self.lab.name, self.lab.reserved)
        except interventions.Intervened as error:
            raise FaultError(f"{planned.kind} on {planned.target.text}: {error}") from error

    def claim_of(self, planned: PlannedFault) -> dict[str, Any]:
        """Return what a fault claims on its target, for holders of other sessions to compare and to name."""
        paths = [(claim.path, claim.resource) for claim in claims_of(planned, self.lab.topology)]
        return claim_of(planned, paths, session=self._session)

    def active(self) -> tuple[PreparedFault, ...]:
        """Return the faults that are prepared and not cleared."""
        return tuple(self._open)

    def overlapping(self, prepared: PreparedFault, *, only_ended: bool = False) -> list[PlannedFault]:
        """Return the other faults that may have moved the counters of `prepared` (`faultbed.inject.policy.overlap`).

        Faults that another command of this controller has armed are among them.
        """
        since_ns = prepared.baseline_ns or time.monotonic_ns()
        own = [
            fault.planned
            for fault in self._all
            if fault is not prepared and fault.may_act_after(since_ns) and not (only_ended and fault.ended_ns is None)
        ]
        others = self._others.since(since_ns, tail_s=TAIL_S)
        return own + [fault for fault, is_over in others if is_over or not only_ended]

    def remove(self, prepared: PreparedFault, receipt: Receipt | None = None) -> None:
        """Remove a fault from the active ones: it was never prepared, or it has ended with this receipt."""
        with self._removing, contextlib.suppress(ValueError):
            if receipt is not None:
                self.receipts += (receipt,)
            self._open.remove(prepared)
            if prepared.was_armed:
                self._ended = (prepared.planned, time.monotonic())

    def keep_idle(self, lease: Lease) -> None:
        """Keep a holder that has reverted idle until the injector ends."""
        with self._opening:
            if not self._is_closed:
                self._idle.append(lease)
                return
        lease.release()

    def clear_all(self) -> tuple[Receipt, ...]:
        """Clear every fault, the last one of each place first; a failure does not stop the others.

        Raises:
            RevertFailed: at least one fault may still be in place.
            CommandFailed: not all were cleared in time.
        """
        by_place: dict[str, list[PreparedFault]] = {}
        for prepared in reversed(self._open[:]):
            by_place.setdefault(prepared.planned.place.node, []).append(prepared)
        # Places side by side: one that hangs must not use up the time of the others.
        of_places = on_each(
            by_place, lambda place: [prepared.clear() for prepared in by_place[place]], timeout_s=CLEAR_ALL_S
        )
        receipts = [receipt for of_place in of_places for receipt in of_place]
        if failed := not_cleared(receipts):
            raise RevertFailed(f"{'; '.join(failed)}; run `faultbed heal`")
        return tuple(receipts)

    def __enter__(self) -> Self:
        self._others.begin()
        stopping.owe(self, self._leave)
        return self

    def _leave(self, _: Sequence[str]) -> str:
        """Return the end of the faults of a command that is ended by force; their holders revert when it is gone."""
        self.abandoned += tuple(map(_name_of, self._begun()))
        return self.end_sentence

    def _begun(self) -> list[PreparedFault]:
        """Return the open faults that may have changed something. One that was never armed cannot any more."""
        return [fault for fault in self._open if fault.began_ns is not None]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._opening:
                self._is_closed = True
            stopping.allow(stopping.FAULTS_S)
            self.clear_all()
        except BaseException as failure:
            # After a second Ctrl-C, closing its channel makes each holder revert by itself.
            begun = self._begun()
            self.abandoned += tuple(map(_name_of, begun))
            for prepared in self._open[:]:
                prepared.lease.release()
                if prepared in begun:
                    self.audit(
                        "not cleared", prepared.planned, detail="its end was not observed: the command was interrupted"
                    )
            self._open.clear()
            if isinstance(error, Exception) or isinstance(failure, KeyboardInterrupt) or error is None:
                raise  # otherwise the command was interrupted, which is why not all faults were cleared
        finally:
            for lease in self._idle:
                lease.release()
            self._idle.clear()
            stopping.settle(self)


def _name_of(fault: PreparedFault) -> str:
    return f"{fault.planned.kind} on {fault.planned.target.text}"
