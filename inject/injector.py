"""Does planned faults and gives receipts: prepare → look → arm → observe → clear, journaled before each change.

The injector is never what guarantees the revert. It beats; the target reverts when the beats stop. What this module
adds is exact timing, the cross-check with independent counters, and an orderly end: leaving the `with` block, by
whatever way, clears everything, and if even that is interrupted, closes the channels, which the holders take as the
end of the lease.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from inject.channels import healed_file, last_heal, local_args, revert_dir
from inject.claims_elsewhere import refuse_elsewhere
from inject.evidence import firing_times
from inject.evidence.receipt import Armed, Cleared, Fired, Receipt, end_sentence, judge_fired, not_cleared
from inject.evidence.witnesses import Witnesses, booting
from inject.lease import ANSWER_S, Lease
from inject.mechanisms.late_binding import learn
from inject.policy import blast_radius, safety
from inject.policy.conflicts import claims_of
from inject.policy.overlap import TAIL_S, own_evidence
from testbed.errors import FaultbedError, FaultError, LabError, RevertFailed
from testbed.tenancy import audit_log, interventions
from testbed.tenancy.lab_lease import who

if TYPE_CHECKING:
    from inject.evidence.firing_times import OnTime
    from inject.fault_plan import PlannedFault
    from inject.journal import Journal
    from testbed.lab import Lab

__all__ = ["TTL_S", "Injector", "Mutation", "Prepared", "longest_lease_s", "told_of"]

TTL_S = 10.0
"""How long a target keeps a fault without hearing from its controller."""
STATES_S = 5.0
"""How long neighbours of a drained switch may take to follow its BGP update, on a starved machine."""

Mutation = Literal["noop", "lie"]
"""Replace a holder's action by nothing; `lie` also claims that it was done. Only for tests of the harness."""


def longest_lease_s(faults: Iterable[PlannedFault], *, ttl_s: float = TTL_S) -> float:
    """Return how long after the controller's death the last of these faults may still be in place."""
    return ttl_s + max((float(each.request.get("patience_s", 0.0)) for each in faults), default=0.0)


def told_of(planned: PlannedFault) -> dict[str, Any]:
    """A fault as the audit tells it: what, where, and how it is undone."""
    return {
        "kind": planned.kind,
        "target": planned.target.text,
        "id": planned.id,
        "place": planned.place.node,
        "for_s": planned.for_s,
        "params": dict(planned.params),
        "do": [step.do for step in planned.steps],
        "revert": [step.undo for step in planned.steps],
    }


class Injector:
    """Faults of one lab in one run. Use as a context manager; its end clears whatever is still there.

    Args:
        lab: the lab.
        journal: where intents go before they are done.
        ttl_s: how long a target keeps a fault without hearing from us.
        mutate: a mutation of every holder, for tests of the harness itself.
        confirmed: kinds without a revert that a person has confirmed for this once.
        until_cleared: the window of a fault ends when it is cleared, and `for_s` is the most that it may last: for
            tests, which clear a fault when they have seen what they came for.
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
        """Receipts of every fault that was cleared, or was to be."""
        self.abandoned: tuple[str, ...] = ()
        """Faults whose end was not seen; their targets revert by themselves when the lease runs out."""
        self._open: list[Prepared] = []
        self._all: list[Prepared] = []
        self._ended: tuple[PlannedFault, float] | None = None
        self._opening = threading.Lock()
        self._is_over = False
        self._idle: list[Lease] = []
        self._session = secrets.token_hex(8)

    def prepare(self, planned: PlannedFault, *, later: bool = False, until_cleared: bool | None = None) -> Prepared:
        """Start the holder on its target and let it look: capability, ownership, the revert. Changes nothing.

        With `later`, a fault of a workload looks when it is told to (`Prepared.look`) or armed: what it is to change
        may not be there yet. `until_cleared` is that of the injector, for this fault alone.

        Raises:
            Forbidden: the lab's owner does not allow it, or not beside the faults that are there.
            FaultError: the target refuses; the message says why.
            Unreachable: it does not answer.
        """
        prepared = Prepared(self, planned)
        prepared.until_cleared = self.until_cleared if until_cleared is None else until_cleared
        try:
            safety.check(planned, self.lab.inventory_model, confirmed=self.confirmed)
            with self._opening:
                if self._is_over:
                    raise FaultError(f"{planned.kind} on {planned.target.text}: the command is ending")
                beside = [*(each.planned for each in self._open), planned]
                blast_radius.check(beside, self.lab.inventory_model)
                safety.check_spacing(beside, self.lab.inventory_model)
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
                if not (later and planned.of_workload):
                    outcome["before"] = prepared.look()
        except BaseException as error:
            self.forget(prepared)
            prepared.lease.let_go()
            self.audit("not prepared", planned, detail=audit_log.told(error))
            raise
        return prepared

    @property
    def not_cleared(self) -> tuple[str, ...]:
        """One sentence for each fault that may still be in place; each of them makes the lab DIRTY."""
        unseen = (f"{fault}: its end was not seen, its target reverts by itself" for fault in self.abandoned)
        return (*not_cleared(self.receipts), *unseen)

    def _check_last_end(self, planned: PlannedFault) -> None:
        """Refuse a fault that would begin too soon after one that has been cleared here, or by another command."""
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
            if (apart_s := ago_s + planned.at_s) < least_s:
                safety.refuse_spacing(earlier, planned, apart_s, self.lab.inventory_model)

    @property
    def end_sentence(self) -> str:
        """How the faults ended, as far as that was seen; empty while none has."""
        return end_sentence(self.receipts, self.abandoned, ttl_s=self.ttl_s)

    def audit(self, event: str, planned: PlannedFault, **more: Any) -> None:
        """Record for the lab's owner what has been done, and how it is undone."""
        audit_log.try_to_append(self.lab.state_dir, event, **told_of(planned), **more)

    def audit_change(self, event: str, planned: PlannedFault) -> None:
        """Record for the lab's owner what is about to be done.

        Raises:
            FaultError: it cannot be written, so it must not be done.
        """
        try:
            audit_log.append(self.lab.state_dir, event, **told_of(planned))
        except OSError as error:
            raise FaultError(
                f"{audit_log.path_of(self.lab.state_dir)}: {error.strerror or error}; nothing is changed without a "
                "record: make room"
            ) from error

    def refuse_after_intervention(self, planned: PlannedFault) -> None:
        """Refuse a fault where `heal`, `reset` or `down` of another command has ended the lab's faults meanwhile.

        Raises:
            FaultError: so it is; the message names that command.
        """
        try:
            interventions.refuse(self.lab.state_dir, self.lab.name, self.lab.ours)
        except interventions.Intervened as error:
            raise FaultError(f"{planned.kind} on {planned.target.text}: {error}") from error

    def claim_of(self, planned: PlannedFault) -> dict[str, Any]:
        """What a fault claims on its target, for holders of other sessions to compare and to name."""
        return {
            "paths": [{"path": list(each.path), "thing": each.thing} for each in claims_of(planned, self.lab.topology)],
            "session": self._session,
            "kind": planned.kind,
            "target": planned.target.text,
            "fault": planned.id,
            "controller": f"{who()}, process {os.getpid()}",
            "since": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        }

    def active(self) -> tuple[Prepared, ...]:
        """Faults that have been prepared and not cleared."""
        return tuple(self._open)

    def overlapping(self, prepared: Prepared, *, only_ended: bool = False) -> list[Prepared]:
        """Return the other faults whose effect may be in what `prepared` compares (`inject.policy.overlap`)."""
        since_ns = prepared.baseline_ns or time.monotonic_ns()
        return [
            each
            for each in self._all
            if each is not prepared and each.may_act_after(since_ns) and not (only_ended and each.ended_ns is None)
        ]

    def forget(self, prepared: Prepared, receipt: Receipt | None = None) -> None:
        """Take a fault off the list: it was never prepared, or this receipt tells its end."""
        if receipt is not None:
            self.receipts += (receipt,)
        with contextlib.suppress(ValueError):
            self._open.remove(prepared)
            if prepared.was_armed:
                self._ended = (prepared.planned, time.monotonic())

    def keep(self, lease: Lease) -> None:
        """Let a holder that has reverted stand idle until all is over."""
        with self._opening:
            if not self._is_over:
                self._idle.append(lease)
                return
        lease.let_go()

    def clear_all(self) -> tuple[Receipt, ...]:
        """Clear everything, last first; every fault is tried even if another one fails.

        Raises:
            RevertFailed: at least one may still be in place.
        """
        receipts = [prepared.clear() for prepared in reversed(self._open[:])]
        if failed := not_cleared(receipts):
            raise RevertFailed(f"{'; '.join(failed)}; run `faultbed heal`")
        return tuple(receipts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._opening:
                self._is_over = True
            self.clear_all()
        except BaseException:
            # A second Ctrl-C, or worse: the end of its channel tells each holder to revert by itself.
            # One that was never to begin has changed nothing, and cannot any more.
            begun = [each for each in self._open if each.began_ns is not None]
            self.abandoned += tuple(f"{each.planned.kind} on {each.planned.target.text}" for each in begun)
            for prepared in self._open[:]:
                prepared.lease.let_go()
                if prepared in begun:
                    self.audit("not cleared", prepared.planned, detail="its end was not seen: the command was ended")
            self._open.clear()
            raise
        finally:
            for lease in self._idle:
                lease.let_go()
            self._idle.clear()


class Prepared:
    """A fault whose holder stands ready on its target. Made by `Injector.prepare`."""

    def __init__(self, injector: Injector, planned: PlannedFault) -> None:
        self.planned = planned
        self.lease = Lease(injector.lab, planned, ttl_s=injector.ttl_s)
        self._injector = injector
        self._lab = injector.lab
        self.until_cleared = False
        self.last_heal = ""
        """What the last `heal` wrote before its holder was started."""
        self.baseline_ns: int | None = None
        """When its baseline was read."""
        self.began_ns: int | None = None
        """When it was to begin; None: it was never to."""
        self.ended_ns: int | None = None
        """When it was cleared, by readback."""
        self._looked: dict[str, Any] | None = None
        self._witnesses = Witnesses(self._lab, planned)
        self._armed = Armed(ok=False, error="never armed")
        self._receipt: Receipt | None = None
        self._clearing = threading.RLock()
        self.reads: list[tuple[int, int]] = []
        """When the lab was read for it before it was armed: (begin, end) in controller ns. No baseline of goodput
        includes these."""

    @property
    def was_armed(self) -> bool:
        """Whether anything was changed on the target, as far as it is known here."""
        return self._armed.ok or self._armed.at_ns is not None

    def look(self) -> dict[str, Any]:
        """What is there before the change; the holder remembers it and refuses what it must not touch. Once.

        Raises:
            FaultError: the target refuses; the message says why.
            Unreachable: it does not answer.
        """
        if self._looked is None:
            try:
                request = self._request()
                looked = dict(self.lease.ask(request)["before"])
                refuse_elsewhere(self._lab, self.planned, request["claim"], where=self.lease.where)
                self._looked = looked
            except FaultbedError as error:
                self._armed = Armed(ok=False, error=str(error))
                raise
        return self._looked

    def baseline(self) -> None:
        """Read the counters that everything after is compared with. `arm` does it if nobody did."""
        with self._reading():
            self.look()
            with self._injector.journal.doing("baseline", fault=self.planned.id):
                self.baseline_ns = time.monotonic_ns()
                self._witnesses.baseline(self.planned)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        begin_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.reads.append((begin_ns, time.monotonic_ns()))

    def arm(
        self,
        *,
        at_ns: int | None = None,
        qp: int | None = None,
        psn: int | None = None,
        given_up: Callable[[], str | None] = lambda: None,
    ) -> Armed:
        """Make the fault be, now or at a controller time (CLOCK_MONOTONIC, ns), and read it back.

        Args:
            at_ns: when; the target waits on its own clock, so that no SSH round trip is in the timing.
            qp: destination QP for a packet fault planned with `qp = any`, instead of asking the RNIC.
            psn: PSN likewise, instead of a relative one.
            given_up: asked until its time has come, once a second or more often; when it gives a reason, the fault is
                not waited for any longer, and `clear` calls it off.

        Raises:
            FaultError: the target could not do it, or it was given up.
        """
        if self._witnesses.before is None:
            if at_ns is None:
                self._wait_for_own_evidence()
            self.baseline()
        with self._reading():
            self.lease.renew_clock()
            learned = learn(self._lab, self.planned.learn, qp=qp, psn=psn, where=self.lease.where, timeout_s=ANSWER_S)
        request: dict[str, Any] = {"do": "arm", **learned}
        if at_ns is not None:
            request["at_ns"] = self.lease.to_node(at_ns)
        self._begin()
        self.began_ns = max(at_ns or 0, time.monotonic_ns())
        with self._injector.journal.doing("arm", fault=self.planned.id, at_ns=at_ns, **learned) as outcome:
            try:
                answer = self.lease.ask(request)
                while answer["event"] == "scheduled" or answer.get("state") == "scheduled":
                    remaining_s = ((at_ns or 0) - time.monotonic_ns()) / 1e9
                    if reason := given_up():
                        raise FaultError(f"{self.lease.where}: given up before its time: {reason}")
                    self.lease.pause(min(max(remaining_s, 0.01), 0.5))
                    answer = self.lease.ask({"do": "observe"})
                if answer["event"] == "observed":
                    if answer["failure"]:
                        raise FaultError(f"{self.lease.where}: {answer['failure']}")
                    answer = {"at_ns": answer["armed_at_ns"], "readback": answer["armed_readback"]}
            except FaultbedError as error:
                self._armed = Armed(ok=False, learned=learned, error=str(error))
                self._injector.audit("not armed", self.planned, detail=str(error))
                raise
            # A PSN ahead of what passes was chosen at the hop: here it would be too late.
            if "ahead" in learned and "psn" in answer["readback"]:
                learned["psn"] = int(answer["readback"]["psn"])
            self._armed = Armed(
                ok=bool(answer["readback"]["applied"]),
                while_on=self._states_while_on(),
                at_ns=self.lease.offset.to_controller(answer["at_ns"]),
                clock_error_ns=self.lease.offset.error_ns,
                readback=answer["readback"],
                learned=learned,
            )
            outcome |= {
                "ok": self._armed.ok,
                "armed_at_ns": self._armed.at_ns,
                "readback": self._armed.readback,
            }
        return self._armed

    def _begin(self) -> None:
        """Record that the fault begins, unless another command has ended the lab's faults meanwhile.

        A `heal` that comes later ends the holder, which stands.
        """
        try:
            self._injector.refuse_after_intervention(self.planned)
        except FaultError as error:
            self.call_off(str(error))
            raise
        self._injector.audit_change("arming", self.planned)

    def may_act_after(self, since_ns: int) -> bool:
        """Whether its effect may still be seen at some time between a moment and now."""
        if self.began_ns is None or self.began_ns > time.monotonic_ns():
            return False
        return self.ended_ns is None or self.ended_ns + int(TAIL_S * 1e9) > since_ns

    def _wait_for_own_evidence(self) -> None:
        """Wait until what a fault before this one may still move can no longer be taken for this one's doing."""
        deadline = time.monotonic() + TAIL_S
        while time.monotonic() < deadline:
            others = [each.planned for each in self._injector.overlapping(self, only_ended=True)]
            if not others or not own_evidence(self.planned, others, self._lab.topology)[1]:
                return
            self.lease.pause(0.1)

    def _states_while_on(self) -> dict[str, int | None]:
        """Read the states that must hold while the fault is on, without asking its holder.

        Neighbours of a switch follow its BGP daemon after a while, so the states are read again until they are as
        planned, for `STATES_S` at most. Returns the last reading that was made within the window, or nothing.
        """
        wanted = dict(self.planned.while_on)
        in_window: dict[str, int | None] = {}
        deadline = time.monotonic() + STATES_S
        while True:
            found = self._witnesses.states(wanted)
            if found == wanted:
                return found
            if self.lease.ask({"do": "observe"})["state"] == "over":
                return in_window
            in_window = found
            if time.monotonic() > deadline:
                return in_window
            self.lease.pause(0.2)

    def observe(self) -> dict[str, Any]:
        """What it has done so far: `state`, `on`, `count`, `first_ns`, `last_ns`, `edges`, in controller time.

        Raises:
            Unreachable: the holder is gone; its target reverts by itself.
        """
        return self.lease.in_our_time(self.lease.ask({"do": "observe"}))

    def wait(self) -> None:
        """Wait until its window is over.

        Raises:
            FaultError: it is not over long after its time.
            Unreachable: the holder is gone; its target reverts by itself.
        """
        deadline = time.monotonic() + self.planned.for_s + ANSWER_S
        while self.observe()["state"] != "over":
            if time.monotonic() > deadline:
                raise FaultError(f"{self.lease.where}: its window of {self.planned.for_s:g} s is not over; clear it")
            self.lease.pause(0.1)

    def call_off(self, reason: str) -> None:
        """Do not arm it any more; its receipt gives the reason."""
        self._armed = Armed(ok=False, error=reason)
        self._injector.audit("not armed", self.planned, detail=reason)

    def clear(self, *, keep_holder: bool = False) -> Receipt:
        """Revert, read back, and judge. A second call gives the same receipt. No error of any kind is raised.

        With `keep_holder`, one that has reverted stands idle until the injector ends: the end of a unit takes an
        emulated host two seconds, right when its recovery is measured.
        """
        with self._clearing:  # a run's thread may be at it when the run's end clears whatever is left
            if self._receipt is None:
                self._receipt = self._cleared_and_judged(keep_holder=keep_holder)
            return self._receipt

    def _cleared_and_judged(self, *, keep_holder: bool) -> Receipt:
        with self._injector.journal.reverting("clear", fault=self.planned.id) as outcome:
            cleared, observed = self._clear()
            if cleared.ok:
                self.ended_ns = cleared.at_ns or time.monotonic_ns()
            cleared, fired, doubts = self._judge(cleared, observed)
            receipt = Receipt(
                id=self.planned.id,
                kind=self.planned.kind,
                target=self.planned.target.text,
                fidelity=self.planned.fidelity,
                armed=self._armed,
                fired=fired,
                cleared=cleared,
                edges=tuple((at, on) for at, on in observed.get("edges", ())),
                doubts=doubts,
                on_time=self._on_time(observed, fired.count),
            )
            outcome |= {"receipt": receipt.to_json(), "doubts": list(doubts)}
        self._injector.audit("cleared" if cleared.ok else "not cleared", self.planned, detail=cleared.error or "")
        if keep_holder and cleared.ok and cleared.by == "holder":
            self._injector.keep(self.lease)
        else:
            self.lease.let_go()
        self._injector.forget(self, receipt)
        return receipt

    def _judge(self, cleared: Cleared, observed: dict[str, Any]) -> tuple[Cleared, Fired, tuple[str, ...]]:
        """Read the witnesses. When that fails, states that had to be restored are not known: it is not cleared."""
        try:
            if observed.get("count") or cleared.by == "lease":
                # What led to a host before its reboot leads nowhere.
                for host in booting(self.planned):
                    self._lab.forget(host)
            others = [each.planned for each in self._injector.overlapping(self)]
            own, _ = own_evidence(self.planned, others, self._lab.topology)
            after, restored, unsettled = self._witnesses.settle(
                own, needs_witness=bool(observed.get("count")), pause=self.lease.pause
            )
            # Another fault may have begun meanwhile.
            others = [each.planned for each in self._injector.overlapping(self)]
            own, shared = own_evidence(self.planned, others, self._lab.topology)
            wrong = unsettled if cleared.ok else None
            cleared = replace(cleared, ok=cleared.ok and not wrong, restored=restored, error=wrong or cleared.error)
            fired, doubts = judge_fired(
                own, armed=self._armed, observed=observed, before=self._witnesses.before or {}, after=after
            )
            if self._armed.ok and fired.count:
                doubts += shared
        except Exception as error:  # noqa: BLE001 (the fault is reverted: whatever fails now must not hide that)
            said = f"its witnesses could not be read: {_said(error)}"
            fired = Fired(
                count=int(observed.get("count") or 0), first_ns=None, last_ns=None, witness=None, must_move={},
                must_not_move={},
            )  # fmt: skip
            return replace(cleared, ok=False, error=cleared.error or said), fired, (said,)
        return cleared, fired, doubts

    def _on_time(self, observed: Mapping[str, Any], count: int) -> OnTime:
        """Return when it was on and was to be; a window that its clearing ends was planned until then."""
        planned, changes = self.planned, observed.get("changes", ())
        edges, window_ns = planned.request["edges"], int(planned.for_s * 1e9)
        asked_ns = observed.get("clear_ns")
        is_open = self.until_cleared and bool(changes) and asked_ns is not None
        if is_open:
            # The window of one change begins when it is there, that of a train when its first change begins.
            begin_ns = changes[0][1 if len(edges) == 1 else 0]
            window_ns = min(window_ns, max(0, asked_ns - begin_ns))
            edges = firing_times.begun(edges, window_ns, changes)
        return firing_times.on_time_of(
            firing_times.planned_spans(edges, window_ns),
            changes,
            switching_ns=int(1e9 * (observed.get("patience_s", 0.0) + planned.request.get("patience_s", 0.0))),
            complete=planned.complete_after is not None and count >= planned.complete_after,
            late_ns=observed.get("late_ns", 0),
            until_cleared=is_open,
        )

    def _request(self) -> dict[str, Any]:
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

    def _clear(self) -> tuple[Cleared, dict[str, Any]]:
        try:
            answer = self.lease.ask({"do": "clear"})
        except FaultError as error:
            return Cleared(ok=False, error=str(error)), {}
        except LabError as error:
            return self._cleared_by_lease(error), {}
        except Exception as error:  # noqa: BLE001 (its channel is closed in any case, and the target reverts)
            return Cleared(ok=False, error=_said(error)), {}
        self.lease.widen_clock()
        observed = self.lease.in_our_time(answer["observed"])
        at_ns = answer["at_ns"]
        return (
            Cleared(
                ok=bool(answer["ok"]),
                at_ns=self.lease.offset.to_controller(at_ns) if at_ns is not None else None,
                clock_error_ns=self.lease.offset.error_ns,
                readback=answer["readback"],
                error=answer.get("error"),
            ),
            observed,
        )

    def _cleared_by_lease(self, error: LabError) -> Cleared:
        """The holder is gone: its target is due to revert alone; look until it has, or until the lease is over."""
        deadline = time.monotonic() + self.lease.ttl_s + 2 + self.lease.patience_s
        while True:
            try:
                if self.lease.has_reverted():
                    return Cleared(ok=True, at_ns=time.monotonic_ns(), by="lease", error=str(error))
            except LabError as unreachable:
                error = unreachable
            if time.monotonic() > deadline:
                return Cleared(ok=False, by="lease", error=f"nobody can tell whether it was reverted: {error}")
            self.lease.pause(0.2)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
