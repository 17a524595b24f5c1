"""Keep a routing scheme on a soft lab's switches during a run, under the same lease as a fault.

The controller sends heartbeats to a holder process on the switches' machine (`faultbed.inject.node.holder`). If they
stop, the holder removes the scheme by itself, and every packet takes BGP's own ECMP again. A killed controller leaves
nothing to revert; the next command compares the lab with its state before the run.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from faultbed.inject.evidence.observation import Change, Observation, Removal, decoded
from faultbed.inject.leases.claim_request import claim_of
from faultbed.inject.leases.lease import Lease
from faultbed.inject.mechanisms.mechanism import Place, Step
from faultbed.testbed.errors import FaultbedError
from faultbed.testbed.node.routing.routing_state import KIND
from faultbed.testbed.routing.switch_tables import SchemeTables
from faultbed.testbed.tenancy import audit_log, interventions

if TYPE_CHECKING:
    from faultbed.inject.injector import Mutation
    from faultbed.inject.journal import Journal
    from faultbed.testbed.lab import Lab

__all__ = ["LEASE_TTL_S", "REMOVAL_TIMEOUT_S", "Deviation", "SchemeLease", "SchemeRelease"]

LEASE_TTL_S = 10.0
"""Time without a heartbeat after which the holder removes the scheme."""
REMOVAL_TIMEOUT_S = 20.0
"""Time that the removal may take beyond the lease; switches that forward under emulation are slow."""
_LONGEST_S = 24 * 3600.0
"""Window of the lease, longer than any run: the run itself releases the scheme."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """A time during which a switch did not route as its scheme was installed, as the switch's machine recorded it.

    Attributes:
        cause: `foreign`, `bgp`, `setting` or `unwatched` (`faultbed.testbed.node.routing.deviations`).
        begin_ns: controller time of the kernel's first notification.
        end_ns: controller time of the last one; None: it had not ended when the scheme was removed.
        what: the difference from the installed scheme, for people.
        port: port by which BGP lost a next hop to `prefix`; both are empty for other causes.
    """

    switch: str
    cause: Literal["foreign", "bgp", "setting", "unwatched"]
    what: str
    begin_ns: int
    end_ns: int | None = None
    port: str = ""
    prefix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeRelease:
    """Outcome of a removal. `ok`: nothing of the scheme is left, or it was never applied; `detail` says more.

    `by` is `holder` if the holder removed the scheme on request, `lease` if the machine removed it by itself. `at_ns`
    is controller time.
    """

    ok: bool
    at_ns: int
    by: str = "holder"
    readback: Mapping[str, Any] = field(default_factory=dict)
    deviations: tuple[Deviation, ...] = ()
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedScheme:
    """A routing scheme on one machine, as `Lease` keeps it; `kind` is in no catalogue, policy or verdict."""

    id: str
    kind: str
    place: Place
    request: Mapping[str, Any]
    fidelity: str
    steps: tuple[Step, ...]
    ends_s: float = _LONGEST_S

    @property
    def target_text(self) -> str:
        """The machine that carries the switches."""
        return self.place.node

    def to_json(self) -> dict[str, Any]:
        """Return plain data for the journal."""
        return {**asdict(self), "target": self.target_text, "for_s": self.ends_s}


class SchemeLease:
    """Lease that keeps one routing scheme on the switches of one machine.

    `apply` installs the scheme; `release` removes it and is idempotent.

    Args:
        lab: a soft lab.
        tables: the scheme.
        machine: the VM that carries the switches.
        journal: records each intent before it is carried out.
        mutate: makes the holder misbehave, for tests of the harness itself.
    """

    def __init__(
        self, lab: Lab, tables: SchemeTables, machine: str, journal: Journal, *, mutate: Mutation | None = None
    ) -> None:
        self._lab, self._journal, self._mutate = lab, journal, mutate
        names = [name for name in tables.switches if lab.carrier(name).name == machine]
        self._names = names
        self._switch_of = {lab.netns(name): name for name in names}
        self.planned = _leased(lab, tables, machine, names)
        self.lease = Lease(lab, self.planned, ttl_s=LEASE_TTL_S)
        self.applied_ns: int | None = None
        self.readback: dict[str, Any] = {}
        self._is_requested = False
        self.released: SchemeRelease | None = None

    def apply(self) -> None:
        """Install the scheme and store its `readback`; `readback["whole"]` is True if every part was read back.

        If the installation fails half-way, the scheme is removed again (`release`) before the error is raised.

        Raises:
            FaultError: a switch refuses the scheme; the message says why.
            Unreachable: the switches' machine does not answer.
            Intervened: another command has ended all faults and schemes of this lab.
        """
        with self._journal.doing("routing", scheme=self.planned.kind, plan=self.planned.to_json()) as outcome:
            interventions.refuse(self._lab.state_dir, self._lab.name, self._lab.reserved)
            self.lease.begin()
            try:
                self.lease.request(self._request())
                # A `heal` that was run before the holder existed could not end it; a later one does.
                interventions.refuse(self._lab.state_dir, self._lab.name, self._lab.reserved)
                audit_log.append_before_change(self._lab.state_dir, "routing applying", **self._audit_fields())
                self._is_requested = True
                applied = self._changed({"do": "arm"})
            except BaseException:
                self.release()
                raise
            self.readback = applied.readback or {}
            self.applied_ns = self.lease.offset.to_controller(applied.at_ns)
            outcome |= {"readback": self.readback, "applied_ns": self.applied_ns}

    def update(self, tables: SchemeTables) -> None:
        """Give the switches the rules of `tables`, additions before removals, and store the new `readback`.

        Raises:
            FaultError: a switch refuses a rule; the message says why.
            Unreachable: the holder is gone, so that its machine removes the scheme by itself.
        """
        rules = {name: tables.rules(name) for name in self._names}
        with self._journal.doing("routing.update", scheme=self.planned.kind, rules=rules) as outcome:
            interventions.refuse(self._lab.state_dir, self._lab.name, self._lab.reserved)
            updated = self._changed({"do": "update", "args": {"rules": [*rules.values()]}})
            self.readback = updated.readback or {}
            outcome |= {"at_ns": self.lease.offset.to_controller(updated.at_ns)}

    def _changed(self, request: Mapping[str, Any]) -> Change:
        return decoded(self.lease.request(request), Change, where=self.lease.where)

    def is_applied(self) -> bool:
        """Return whether the holder reports the scheme as applied; False if the holder does not answer."""
        try:
            return decoded(self.lease.request({"do": "observe"}), Observation, where=self.lease.where).on
        except FaultbedError:
            return False

    def release(self) -> SchemeRelease:
        """Remove the scheme and read back that nothing of it is left. Errors are returned in `detail`, not raised."""
        if self.released is None:
            with self._journal.reverting("routing.release", scheme=self.planned.kind) as outcome:
                self.released = self._release()
                outcome |= {"ok": self.released.ok, "by": self.released.by, "error": self.released.detail}
                outcome["deviations"] = [asdict(deviation) for deviation in self.released.deviations]
            event = "routing released" if self.released.ok else "routing not released"
            fields = self._audit_fields() | {"detail": self.released.detail}
            audit_log.try_to_append(self._lab.state_dir, event, **fields)
            self.lease.release()
        return self.released

    def _release(self) -> SchemeRelease:
        if not self._is_requested:
            return SchemeRelease(ok=True, at_ns=time.monotonic_ns(), detail="the scheme was not applied")
        try:
            removal = decoded(self.lease.request({"do": "clear"}), Removal, where=self.lease.where)
        except FaultbedError as error:
            has_reverted, detail = self.lease.wait_until_reverted(error)
            return SchemeRelease(ok=has_reverted, at_ns=time.monotonic_ns(), by="lease", detail=detail)
        at_ns = removal.at_ns
        return SchemeRelease(
            ok=removal.ok,
            at_ns=time.monotonic_ns() if at_ns is None else self.lease.offset.to_controller(at_ns),
            readback=removal.readback,
            deviations=tuple(map(self._deviation, removal.readback.get("deviations", ()))),
            detail=removal.error or "",
        )

    def _deviation(self, recorded: Mapping[str, Any]) -> Deviation:
        to_controller, end_ns = self.lease.offset.to_controller, recorded["end_ns"]
        return Deviation(
            switch=self._switch_of[recorded["netns"]],
            cause=recorded["cause"],
            what=recorded["what"],
            begin_ns=to_controller(recorded["begin_ns"]),
            end_ns=None if end_ns is None else to_controller(end_ns),
            port=recorded["port"],
            prefix=recorded["prefix"],
        )

    def _request(self) -> dict[str, Any]:
        machine = self.planned.place.node
        paths = [(("machine", machine, "routing"), f"the routing scheme of {machine}")]
        claim = claim_of(self.planned, paths, session=secrets.token_hex(8))
        mutation = {"mutate": self._mutate} if self._mutate else {}
        return {**self.planned.request, "id": self.lease.instance, "ttl_s": LEASE_TTL_S, "claim": claim, **mutation}

    def _audit_fields(self) -> dict[str, Any]:
        planned = self.planned
        return {"kind": planned.kind, "target": planned.target_text, "id": planned.id, "place": planned.place.node}


def _leased(lab: Lab, tables: SchemeTables, machine: str, names: Sequence[str]) -> LeasedScheme:
    request = {
        "do": "prepare",
        "actuator": "scheme",
        "args": {"switches": [tables.request(name, lab.netns(name)) for name in names]},
        "edges": [[0.0, True]],
        "window_s": _LONGEST_S,
        "patience_s": REMOVAL_TIMEOUT_S,
    }
    return LeasedScheme(
        id=f"routing-{tables.scheme.name}",
        kind=f"{KIND}{tables.scheme.name}",
        place=Place(node=machine),
        request=request,
        fidelity=tables.scheme.fidelity,
        steps=(Step(do=f"tables, rules, marks of {tables.scheme.name} on {', '.join(names)}", undo="faultbed heal"),),
    )
