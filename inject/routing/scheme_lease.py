"""Holds a routing scheme on a soft lab's switches for as long as a run needs it, under the lease that faults have.

The controller beats; when the beats stop, the switches' machine removes the scheme by itself (`inject.node.holder`). So
there is nothing that a killed controller has to revert: within the lease every packet takes BGP's own ECMP again, and
the next command compares the lab with what it was before.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from inject.fault_plan import PlannedFault
from inject.leases.lease import Lease
from inject.mechanisms.mechanism import Place, Step
from testbed.errors import FaultbedError
from testbed.model.topology import Target
from testbed.node.routing.agent import KIND
from testbed.routing.switch_tables import SchemeTables, fidelity_of
from testbed.tenancy import audit_log, interventions
from testbed.tenancy.lab_lease import who

if TYPE_CHECKING:
    from inject.injector import Mutation
    from inject.journal import Journal
    from testbed.lab import Lab

__all__ = ["PATIENCE_S", "TTL_S", "Hold", "Released"]

TTL_S = 10.0
"""How long switches keep a scheme without hearing from the controller."""
PATIENCE_S = 20.0
"""How much longer removing it may take, on switches that forward under emulation."""
_LONGEST_S = 24 * 3600.0
"""Longer than any run: the run releases the scheme."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """How a scheme ended: `ok` when the readback shows nothing of it. `by` is `holder`, or `lease`: without us."""

    ok: bool
    at_ns: int
    by: str = "holder"
    readback: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


class Hold:
    """One scheme on the switches of one machine. `hold` applies it; `release` removes it, and may be called twice.

    Args:
        lab: a soft lab.
        tables: the scheme.
        machine: the VM that carries the switches.
        journal: where intents go before they are done.
        mutate: replace the action by nothing, for tests of the harness.
    """

    def __init__(
        self, lab: Lab, tables: SchemeTables, machine: str, journal: Journal, *, mutate: Mutation | None = None
    ) -> None:
        self._lab, self._journal, self._mutate = lab, journal, mutate
        names = [name for name in tables.switches if lab.carrier(name).name == machine]
        self.planned = _planned(lab, tables, machine, names)
        self.lease = Lease(lab, self.planned, ttl_s=TTL_S)
        self.applied_ns: int | None = None
        self.readback: dict[str, Any] = {}
        self.released: Released | None = None

    def hold(self) -> None:
        """Apply the scheme and read it back (`readback`); whether it is there as a whole is in `readback["whole"]`.

        Raises:
            FaultError: the switches refuse; the message says why.
            Unreachable: their machine does not answer.
            Intervened: another command has ended what is held on this lab.
        """
        with self._journal.doing("routing", scheme=self.planned.kind, plan=self.planned.to_json()) as outcome:
            interventions.refuse(self._lab.state_dir, self._lab.name, self._lab.ours)
            self.lease.begin()
            try:
                self.lease.request(self._request())
                self._audit("routing applying")
                answer = self.lease.request({"do": "arm"})
            except BaseException:
                self.lease.release()  # a holder that has begun reverts at the end of its channel
                raise
            self.readback = dict(answer["readback"])
            self.applied_ns = self.lease.offset.to_controller(answer["at_ns"])
            outcome |= {"readback": self.readback, "applied_ns": self.applied_ns}

    def is_held(self) -> bool:
        """Return whether its holder says that the scheme is on; False when the holder is gone."""
        try:
            return bool(self.lease.request({"do": "observe"})["on"])
        except FaultbedError:
            return False

    def release(self) -> Released:
        """Remove the scheme and read back that nothing of it is left. No error is raised."""
        if self.released is None:
            with self._journal.reverting("routing.release", scheme=self.planned.kind) as outcome:
                self.released = self._release()
                outcome |= {"ok": self.released.ok, "by": self.released.by, "error": self.released.error}
            self._audit("routing released" if self.released.ok else "routing not released", detail=self.released.error)
            self.lease.release()
        return self.released

    def _release(self) -> Released:
        if self.applied_ns is None:
            return Released(ok=True, at_ns=time.monotonic_ns(), error="it was never applied")
        try:
            answer = self.lease.request({"do": "clear"})
        except FaultbedError as error:
            return self._released_by_lease(error)
        at_ns = answer.get("at_ns")
        return Released(
            ok=bool(answer["ok"]),
            at_ns=time.monotonic_ns() if at_ns is None else self.lease.offset.to_controller(at_ns),
            readback=answer["readback"],
            error=answer.get("error") or "",
        )

    def _released_by_lease(self, error: FaultbedError) -> Released:
        """Wait until the machine has removed the scheme without us, or the lease is over."""
        deadline = time.monotonic() + self.lease.ttl_s + 2 + self.lease.patience_s
        while True:
            try:
                if self.lease.has_reverted():
                    return Released(ok=True, at_ns=time.monotonic_ns(), by="lease", error=str(error))
            except FaultbedError as unreachable:
                error = unreachable
            if time.monotonic() > deadline:
                return Released(ok=False, at_ns=time.monotonic_ns(), by="lease", error=str(error))
            self.lease.pause(0.2)

    def _request(self) -> dict[str, Any]:
        machine = self.planned.place.node
        claim = {
            "paths": [{"path": ["machine", machine, "routing"], "thing": f"the routing scheme of {machine}"}],
            "session": secrets.token_hex(8),
            "kind": self.planned.kind,
            "target": machine,
            "fault": self.planned.id,
            "controller": f"{who()}, process {os.getpid()}",
            "since": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        }
        mutation = {"mutate": self._mutate} if self._mutate else {}
        return {**self.planned.request, "id": self.lease.instance, "ttl_s": TTL_S, "claim": claim, **mutation}

    def _audit(self, event: str, **more: Any) -> None:
        audit_log.try_to_append(
            self._lab.state_dir, event, kind=self.planned.kind, target=self.planned.target.text, id=self.planned.id,
            place=self.planned.place.node, **more,
        )  # fmt: skip


def _planned(lab: Lab, tables: SchemeTables, machine: str, names: Sequence[str]) -> PlannedFault:
    """Return a scheme in the form that leases take. It is no fault: no catalogue, policy or verdict knows its kind."""
    request = {
        "do": "prepare",
        "actuator": "scheme",
        "args": {"switches": [tables.request(name, lab.netns(name)) for name in names]},
        "edges": [[0.0, True]],
        "window_s": _LONGEST_S,
        "patience_s": PATIENCE_S,
    }
    return PlannedFault(
        id=f"routing-{tables.scheme}",
        kind=f"{KIND}{tables.scheme}",
        target=Target(text=machine, kind="host", node=machine),
        at_s=0.0,
        for_s=_LONGEST_S,
        params={},
        lab_kind=lab.kind,
        fidelity=fidelity_of(tables.scheme),
        binding="unit",
        colour="#000000",
        place=Place(node=machine),
        request=request,
        steps=(Step(do=f"tables, rules and marks of {tables.scheme} on {', '.join(names)}", undo="faultbed heal"),),
        must_move=(),
        must_not_move=(),
        restored=(),
        shows={},
        while_on=(),
        late_binding=None,
        of_workload=False,
    )
