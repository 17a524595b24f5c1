"""One fault whose holder is ready on its target: baseline → arm → observe → clear, each recorded in the journal.

Made by `faultbed.inject.injector.Injector.prepare`. No error of `clear` is raised: its receipt says what is wrong.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from faultbed.inject.evidence.exposure import is_used
from faultbed.inject.evidence.firing_times import on_time_of_fault
from faultbed.inject.evidence.observation import NOTHING, Change, Observation, Readiness, Removal, decoded
from faultbed.inject.evidence.receipt import Armed, Cleared, Fired, Receipt, concluded, judge_fired
from faultbed.inject.evidence.witnesses import Witnesses, rebooting_hosts
from faultbed.inject.evidence.workload_use import Exposure, WorkloadUse
from faultbed.inject.leases.channels import healed_file, local_args, revert_dir
from faultbed.inject.leases.lease import ANSWER_S, Lease
from faultbed.inject.leases.remote_claims import refuse_remote_conflicts
from faultbed.inject.mechanisms import late_target
from faultbed.inject.mechanisms.late_binding import bind
from faultbed.inject.own_reads import recorded
from faultbed.inject.policy.overlap import TAIL_S, own_evidence
from faultbed.testbed.errors import FaultbedError, FaultError, LabError
from faultbed.testbed.tenancy import interventions

if TYPE_CHECKING:
    from faultbed.inject.injector import Injector
    from faultbed.inject.mechanisms.planned_fault import PlannedFault

__all__ = ["USE_S", "PreparedFault"]

STATES_S = 5.0
"""How long neighbours of a drained switch may take to follow its BGP update, on a starved machine."""

USE_S = 4.0
"""Pause between two readings of what workloads use, while nothing shows that they use the target of a fault."""
LAST_USE_S = 10.0


class PreparedFault:
    """A fault whose holder is ready on its target."""

    def __init__(self, injector: Injector, planned: PlannedFault) -> None:
        self.planned = planned
        self.lease = Lease(injector.lab, planned, ttl_s=injector.ttl_s)
        self._injector = injector
        self._lab = injector.lab
        self.until_cleared = False
        self.last_heal = ""
        """Content of the file of the last `heal` before this holder was started."""
        self.baseline_ns: int | None = None
        """When the baseline of the counters was read."""
        self.began_ns: int | None = None
        """When the fault was due to begin; None: it was never armed."""
        self.ended_ns: int | None = None
        """When the fault was cleared, by readback."""
        self._before: dict[str, Any] | None = None
        self._witnesses = Witnesses(self._lab, planned)
        self._armed = Armed(ok=False, error="never armed")
        self._receipt: Receipt | None = None
        self._clearing = threading.RLock()
        self.reads: list[tuple[int, int]] = []
        """Times at which the lab was read for this fault: (begin, end) in controller ns. Baselines of goodput leave
        these times out, because reading disturbs traffic."""
        self._uses: list[WorkloadUse] = []
        self._reverted = threading.Event()
        self._following: threading.Thread | None = None

    @property
    def was_armed(self) -> bool:
        """Whether anything was changed on the target, as far as the controller knows."""
        return self._armed.ok or self._armed.at_ns is not None

    @property
    def is_on(self) -> bool:
        """Whether the fault was due to begin, and has not been cleared yet."""
        return self.began_ns is not None and self.began_ns <= time.monotonic_ns() and self.ended_ns is None

    # Before the change

    def prepare_target(self) -> dict[str, Any]:
        """Return the target's state before the change. The holder stores it, and refuses a target it must not touch.

        A target that depends on what the workload uses is chosen first. A second call returns the same state.

        Raises:
            FaultError: the target refuses, or none can be chosen; the message says why.
            Unreachable: the target does not answer.
        """
        if self._before is None:
            try:
                self._choose_target()
                request = self._prepare_request()
                before = decoded(self.lease.request(request), Readiness, where=self.lease.where).before
                refuse_remote_conflicts(self._lab, self.planned, request["claim"], where=self.lease.where)
                self._before = before
            except FaultbedError as error:
                self._armed = Armed(ok=False, error=str(error))
                raise
        return self._before

    def _choose_target(self) -> None:
        """Choose the target among the links that the workload uses now, if the plan leaves it open."""
        planned = self.planned
        if not planned.candidates:
            return
        among = [option.target.text for option in planned.candidates]
        with self._injector.journal.doing("choose", fault=planned.id, among=among) as outcome:
            use = self._injector.use_of(planned) if self._injector.use_of is not None else None
            self.planned = late_target.chosen(planned, use, self._lab.topology, where=self.lease.where)
            self._uses += [use] if use is not None else []
            outcome["target"] = self.planned.target.text

    def baseline(self) -> None:
        """Read the counters that later readings are compared with. `arm` calls this if it was not done before."""
        with recorded(self.reads):
            self.prepare_target()
            with self._injector.journal.doing("baseline", fault=self.planned.id):
                self.baseline_ns = time.monotonic_ns()
                try:
                    self._witnesses.baseline(self.planned)
                except FaultError as error:
                    self._armed = Armed(ok=False, error=str(error))
                    raise

    def note_use(self) -> None:
        """Record what workloads use now, unless they are known to use the target already."""
        use_of = self._injector.use_of
        if use_of is None or self._is_shown_used():
            return
        with recorded(self.reads):
            use = use_of(self.planned)
        self._uses += [use] if use is not None else []

    def _is_shown_used(self) -> bool:
        return any(is_used(use, self.planned.target, self._lab.topology) for use in self._uses)

    def _follow_use(self) -> None:
        """Record what workloads use until the fault is cleared, or until they are known to use its target."""
        while not self._is_shown_used():
            try:
                self.note_use()
            except Exception as error:  # noqa: BLE001 (an answer that is missing is unknown, and ends no fault)
                hosts = tuple(self._lab.topology.host_by_name)
                unknown = WorkloadUse(at_ns=time.monotonic_ns(), unread=hosts, unknown_paths=_error_text(error))
                self._uses.append(unknown)
            if self._reverted.wait(USE_S):
                return

    def cancel(self, reason: str) -> None:
        """Mark the fault as never to be armed; its receipt gives the reason."""
        self._armed = Armed(ok=False, error=reason)
        self._injector.audit("not armed", self.planned, detail=reason)

    def _prepare_request(self) -> dict[str, Any]:
        request = {
            **self.planned.request,
            "id": self.lease.instance,
            "ttl_s": self.lease.ttl_s,
            "claim": self._injector.claim_of(self.planned),
        }
        if self._injector.mutate is not None:
            request["mutate"] = self._injector.mutate
        if self.planned.place.local:
            args = {**request["args"], **local_args(self._lab, request)}
            revert_dir(self._lab).mkdir(parents=True, exist_ok=True)
            request |= {
                "args": args,
                "revert_dir": str(revert_dir(self._lab)),
                "healed": {"file": str(healed_file(self._lab)), "said": self.last_heal},
            }
        return request

    # The change

    def arm(
        self,
        *,
        at_ns: int | None = None,
        qp: int | None = None,
        psn: int | None = None,
        cancel_reason: Callable[[], str | None] = lambda: None,
    ) -> Armed:
        """Arm the fault, now or at a controller time (CLOCK_MONOTONIC, ns), and read the change back.

        Args:
            at_ns: when; the target waits on its own clock, so that no SSH round trip affects the timing.
            qp: destination QP for a packet fault planned with `qp = any`, instead of querying the RNIC.
            psn: PSN for a packet fault planned with a relative PSN.
            cancel_reason: called until the fault is due, at least once a second; once it returns a reason, this stops
                waiting, and `clear` cancels the fault.

        Raises:
            FaultError: the target could not make the change, or the fault was cancelled.
            Unreachable: the target does not answer.
        """
        if self._witnesses.before is None:
            if at_ns is None:
                self._wait_for_own_evidence()
            self.baseline()
        self.note_use()
        with recorded(self.reads):
            self.lease.renew_clock()
            bound = bind(
                self._lab,
                self.planned.mechanism.late_binding,
                qp=qp,
                psn=psn,
                where=self.lease.where,
                timeout_s=ANSWER_S,
            )
        self._refuse_after_intervention()
        self.began_ns = max(at_ns or 0, time.monotonic_ns())
        with self._injector.journal.doing("arm", fault=self.planned.id, at_ns=at_ns, **bound) as outcome:
            try:
                armed_at_ns, readback = self._arm_at(at_ns, bound, cancel_reason)
            except FaultbedError as error:
                self._armed = Armed(ok=False, learned=bound, error=str(error))
                self._injector.audit("not armed", self.planned, detail=str(error))
                raise
            # The hop chose the PSN when it was armed: a PSN chosen by the controller would come too late.
            if "ahead" in bound and "psn" in readback:
                bound["psn"] = int(readback["psn"])
            self._armed = Armed(
                ok=bool(readback["applied"]),
                while_on=self._states_while_on(),
                at_ns=self.lease.offset.to_controller(armed_at_ns),
                clock_error_ns=self.lease.offset.error_ns,
                readback=readback,
                learned=bound,
            )
            outcome |= {"ok": self._armed.ok, "armed_at_ns": self._armed.at_ns, "readback": readback}
        if self._armed.ok and self._uses:  # without a workload nothing is used, and a target that hangs answers late
            self._following = threading.Thread(target=self._follow_use, name="use", daemon=True)
            self._following.start()
        return self._armed

    def _refuse_after_intervention(self) -> None:
        """Refuse to arm if another command has ended the lab's faults meanwhile; record that the fault begins.

        A `heal` that comes later ends the holder, which exists by now.
        """
        try:
            self._injector.refuse_after_intervention(self.planned)
        except FaultError as error:
            self.cancel(str(error))
            raise
        self._injector.audit_change("arming", self.planned)

    def _arm_at(
        self, at_ns: int | None, bound: Mapping[str, int], cancel_reason: Callable[[], str | None]
    ) -> tuple[int, dict[str, Any]]:
        """Send the arm request and wait until the fault is on; return the target's time and the readback."""
        request: dict[str, Any] = {"do": "arm", **bound}
        if at_ns is not None:
            request["at_ns"] = self.lease.to_node(at_ns)
        change = decoded(self.lease.request(request), Change, where=self.lease.where)
        if change.readback is not None:
            return change.at_ns, change.readback
        observed = None
        while observed is None or observed.state == "scheduled":
            remaining_s = ((at_ns or 0) - time.monotonic_ns()) / 1e9
            if reason := cancel_reason():
                raise FaultError(f"{self.lease.where}: cancelled before it was due: {reason}")
            self.lease.pause(min(max(remaining_s, 0.01), 0.5))
            observed = _observation(self.lease)
        if observed.armed_at_ns is None or observed.armed_readback is None or observed.failure:
            raise FaultError(f"{self.lease.where}: {observed.failure or 'its holder reports no change'}")
        return observed.armed_at_ns, observed.armed_readback

    def _wait_for_own_evidence(self) -> None:
        """Wait until the effects of earlier faults can no longer be mistaken for effects of this one."""
        deadline = time.monotonic() + TAIL_S
        while time.monotonic() < deadline:
            overlapping = self._injector.overlapping(self, only_ended=True)
            # Wait even if some witnesses are left: the fault need not move those, it may move only the others.
            if own_evidence(self.planned, overlapping, self._lab.topology) == (self.planned, ()):
                return
            self.lease.pause(0.1)

    def _states_while_on(self) -> dict[str, int | None]:
        """Read the states that must hold while the fault is on, independently of its holder.

        Neighbours of a switch follow its BGP daemon after a while, so the states are read again until they are as
        planned, for `STATES_S` at most. Returns the last reading made within the window, or nothing.
        """
        planned = dict(self.planned.mechanism.while_on)
        in_window: dict[str, int | None] = {}
        deadline = time.monotonic() + STATES_S
        while True:
            states = self._witnesses.states(planned)
            if states == planned:
                return states
            if _observation(self.lease).state == "over":
                return in_window
            in_window = states
            if time.monotonic() > deadline:
                return in_window
            self.lease.pause(0.2)

    # While the fault is on

    def may_act_after(self, since_ns: int) -> bool:
        """Return whether the fault's effect may still be visible at some time between `since_ns` and now."""
        if self.began_ns is None or self.began_ns > time.monotonic_ns():
            return False
        return self.ended_ns is None or self.ended_ns + int(TAIL_S * 1e9) > since_ns

    def observe(self) -> Observation:
        """Return the holder's observation in controller time.

        Raises:
            Unreachable: the holder is gone; its target reverts by itself.
        """
        return _observation(self.lease).in_controller_time(self.lease.offset)

    def wait(self) -> None:
        """Wait until the fault's window is over.

        Raises:
            FaultError: the window is still open `ANSWER_S` after its planned end.
            Unreachable: the holder is gone; its target reverts by itself.
        """
        deadline = time.monotonic() + self.planned.spec.for_s + ANSWER_S
        while self.observe().state != "over":
            if time.monotonic() > deadline:
                raise FaultError(
                    f"{self.lease.where}: its window of {self.planned.spec.for_s:g} s ended {ANSWER_S:g} s ago, and it "
                    "is still on; clear it"
                )
            self.lease.pause(0.1)

    # The revert

    def clear(self, *, keep_holder: bool = False) -> Receipt:
        """Revert the fault, read back, and judge it. A second call returns the same receipt; errors are in the receipt.

        With `keep_holder`, a holder that has reverted stays idle until the injector ends. Ending its unit would take an
        emulated host two seconds, just when the recovery is measured.
        """
        with self._clearing:  # a thread of the run may be clearing when the run's end clears what is left
            if self._receipt is None:
                self._receipt = self._clear_and_judge(keep_holder=keep_holder)
            return self._receipt

    def _clear_and_judge(self, *, keep_holder: bool) -> Receipt:
        with self._injector.journal.reverting("clear", fault=self.planned.id) as outcome:
            cleared, observed = self._clear()
            self._end_following()
            if cleared.ok:
                self.ended_ns = cleared.at_ns or time.monotonic_ns()
            cleared, fired, doubts = self._judge(cleared, observed)
            receipt = Receipt(
                id=self.planned.spec.id or self.planned.id,
                kind=self.planned.kind,
                target=self.planned.target.text,
                fidelity=self.planned.fidelity,
                armed=self._armed,
                fired=fired,
                cleared=cleared,
                edges=observed.edges,
                exposed=Exposure(uses=tuple(self._uses)),
                on_time=on_time_of_fault(
                    self.planned,
                    observed,
                    count=fired.count,
                    until_cleared=self.until_cleared,
                    drifted_ns=self.lease.drifted_ns,
                ),
            )
            receipt = concluded(receipt, doubts)
            outcome["receipt"] = receipt.to_json()
        self._injector.audit("cleared" if cleared.ok else "not cleared", self.planned, detail=cleared.error or "")
        if keep_holder and cleared.ok and cleared.by == "holder":
            self._injector.keep_idle(self.lease)
        else:
            self.lease.release()
        self._injector.remove(self, receipt)
        return receipt

    def _end_following(self) -> None:
        """Wait for the last reading of what workloads use; the target has reverted, so that this delays no revert."""
        self._reverted.set()
        if self._following is not None:
            self._following.join(LAST_USE_S)

    def _clear(self) -> tuple[Cleared, Observation]:
        try:
            removal = decoded(self.lease.request({"do": "clear"}), Removal, where=self.lease.where)
        except FaultError as error:
            return Cleared(ok=False, error=str(error)), NOTHING
        except LabError as error:
            return self._cleared_by_lease(error), NOTHING
        except Exception as error:  # noqa: BLE001 (its channel is closed in any case, and the target reverts)
            return Cleared(ok=False, error=_error_text(error)), NOTHING
        self.lease.widen_clock()
        cleared = Cleared(
            ok=removal.ok,
            at_ns=self.lease.offset.to_controller(removal.at_ns) if removal.at_ns is not None else None,
            clock_error_ns=self.lease.offset.error_ns,
            readback=removal.readback,
            error=removal.error,
        )
        return cleared, removal.observed.in_controller_time(self.lease.offset)

    def _cleared_by_lease(self, error: LabError) -> Cleared:
        has_reverted, detail = self.lease.wait_until_reverted(error)
        if has_reverted:
            return Cleared(ok=True, at_ns=time.monotonic_ns(), by="lease", error=detail)
        return Cleared(ok=False, by="lease", error=f"it is unknown whether its target has reverted: {detail}")

    def _judge(self, cleared: Cleared, observed: Observation) -> tuple[Cleared, Fired, tuple[str, ...]]:
        """Compare the witnesses with the baseline. If they cannot be read, the fault does not count as cleared."""
        try:
            if observed.count or cleared.by == "lease":
                for host in rebooting_hosts(self.planned):
                    self._lab.forget_dead(host)
            own, _ = self._own_evidence()
            mechanism = dataclasses.replace(own.mechanism, quality=self._ports_without_other_faults())
            own = dataclasses.replace(own, mechanism=mechanism)
            after, restored, unsettled = self._witnesses.settle(
                own, needs_witness=bool(observed.count), pause=self.lease.pause
            )
            # Another fault may have begun while the witnesses settled.
            own, shared = self._own_evidence()
            wrong = unsettled if cleared.ok else None
            is_ok = cleared.ok and not wrong
            cleared = msgspec.structs.replace(cleared, ok=is_ok, restored=restored, error=wrong or cleared.error)
            fired, doubts = judge_fired(
                own, armed=self._armed, observed=observed, before=self._witnesses.before or {}, after=after
            )
            if self._armed.ok and fired.count:
                doubts += shared
            if cleared.by == "lease" and (ended := interventions.since_begin(self._lab.state_dir, self._lab.reserved)):
                doubts += (ended,)
        except Exception as error:  # noqa: BLE001 (the fault is reverted: a later failure must not hide that)
            doubt = f"its witnesses could not be read: {_error_text(error)}"
            fired = Fired(
                count=observed.count or 0, first_ns=None, last_ns=None, witness=None, must_move={},
                must_not_move={},
            )  # fmt: skip
            return msgspec.structs.replace(cleared, ok=False, error=cleared.error or doubt), fired, (doubt,)
        return cleared, fired, doubts

    def _ports_without_other_faults(self) -> tuple[str, ...]:
        """Return the ports whose error rates tell of this fault alone; a fault that is still on is compared later."""
        others = {port for fault in self._injector.active() if fault is not self and fault.is_on
                  for port in fault.planned.mechanism.quality}  # fmt: skip
        return tuple(port for port in self.planned.mechanism.quality if port not in others)

    def _own_evidence(self) -> tuple[PlannedFault, tuple[str, ...]]:
        lead_ns = max(0, (self.began_ns or 0) - (self.baseline_ns or 0)) if self.baseline_ns else 0
        others = self._injector.overlapping(self)
        return own_evidence(self.planned, others, self._lab.topology, lead_s=lead_ns / 1e9)


def _observation(lease: Lease) -> Observation:
    """Return what a holder has seen of its fault, in its own time."""
    return decoded(lease.request({"do": "observe"}), Observation, where=lease.where)


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
