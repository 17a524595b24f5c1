"""The plan of one run, from its experiment and seed: `plan.json`, byte-identical for the same inputs.

The seed alone decides everything that the file leaves open:

- a fault's `target` is a list: which one;
- a fault's `at` is a range: when, to the millisecond, evenly over the range, both ends included;
- each fault's own `seed`, from which the injector draws (for example, which packets `packet.drop` drops).

Every draw is SHA-256 over `<seed>/<fault id>/<what>`, so it depends on no library's generator, and adding or
moving one fault does not change the draws of the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec

from faultbed.harness.experiment.experiment_file import Expectation, Experiment, Fault, Scalar
from faultbed.harness.experiment.metrics import Of, lookup
from faultbed.harness.experiment.stop import METRICS, Condition
from faultbed.harness.json_text import json_text
from faultbed.harness.verdict import Verdict
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.kinds.kind import Fidelity
from faultbed.testbed.packets.cnp_rule import CnpRule
from faultbed.testbed.routing.schemes import SCHEMES
from faultbed.traffic.flows.flow_spec import FlowSpec
from faultbed.traffic.probes.prober import ProbeSpec

__all__ = ["Plan", "decode", "encode", "plan"]

_MS = 1_000_000
T = TypeVar("T", bound=msgspec.Struct)


class PlannedFabric(msgspec.Struct, frozen=True, kw_only=True):
    """The routing scheme that the switches have while the workload runs, with the parameters that it takes."""

    routing: str
    fidelity: Fidelity
    parameters: dict[str, Any] = {}


class PlannedExpectation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A bound of the experiment on a metric of this lab: selectors of hosts are resolved."""

    metric: str
    minimum: float | int | None = None
    maximum: float | int | None = None
    equals: Scalar | None = None
    of: Of | None = None


class PlannedStop(msgspec.Struct, frozen=True, kw_only=True):
    """A stop condition: the run is ended as `verdict` if `metric` is beyond `bound` for `for_ns`."""

    metric: str
    bound: float | int
    for_ns: int
    verdict: Verdict


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`plan.json`. `inventory` is the inventory's digest, `faultbed` the version that planned."""

    schema: Literal[1] = 1
    faultbed: str
    experiment: str
    seed: int
    inventory: str
    workload: dict[str, Any]
    faults: tuple[FaultSpec, ...]
    """With their targets, times and seeds drawn."""
    capture: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """Switch ports whose packets are kept; not in the file when there are none."""
    cnp: CnpRule | msgspec.UnsetType = msgspec.UNSET
    """How receivers answer marked packets; not in the file when that is not checked."""
    probe: ProbeSpec | msgspec.UnsetType = msgspec.UNSET
    """Not in the file when there are none."""
    fabric: PlannedFabric | msgspec.UnsetType = msgspec.UNSET
    """Not in the file when the experiment chooses no routing scheme: the switches keep BGP's ECMP."""
    bystander: FlowSpec | msgspec.UnsetType = msgspec.UNSET
    """Not in the file when there is none."""
    expect: tuple[PlannedExpectation, ...] | msgspec.UnsetType = msgspec.UNSET
    """Not in the file when there are none."""
    stop: tuple[PlannedStop, ...] | msgspec.UnsetType = msgspec.UNSET
    """Not in the file when there are none."""
    control: bool | msgspec.UnsetType = msgspec.UNSET
    """Every fault is armed with zero intensity (`run --control`); not in the file when the faults are real."""
    parts: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """What parts of the experiment decided about it on this lab, by their names; not in the file when it is nothing."""

    @property
    def is_control(self) -> bool:
        """Whether every fault is armed with zero intensity."""
        return self.control is True

    def fitted(self, part: str, kind: type[T]) -> T | None:
        """Return what a part decided; None: nothing.

        Raises:
            msgspec.ValidationError: it is of another form.
        """
        decided = self.parts.get(part) if isinstance(self.parts, dict) else None
        return None if decided is None else msgspec.convert(decided, kind)

    @property
    def expectations(self) -> tuple[Expectation, ...]:
        """The bounds as the decoder returns them.

        Raises:
            ValueError: the plan bounds a metric that does not exist.
        """
        return tuple(_expectation(planned, [fault.id for fault in self.faults]) for planned in self.expect or ())

    @property
    def stops(self) -> tuple[Condition, ...]:
        """The stop conditions as the decoder returns them.

        Raises:
            ValueError: the plan bounds a live value that does not exist.
        """
        return tuple(_condition(planned) for planned in self.stop or ())


def plan(experiment: Experiment, *, seed: int | None = None, inventory_digest: str, version: str) -> Plan:
    """Return what one run does. `seed` overrides the seed of the file.

    Faults are ordered by their time; faults at the same time keep the order of the file.
    """
    chosen = experiment.seed if seed is None else seed
    faults = sorted((_schedule(fault, chosen) for fault in experiment.faults), key=lambda fault: fault.at_s)
    return Plan(
        faultbed=version,
        experiment=experiment.name,
        seed=chosen,
        inventory=inventory_digest,
        workload=msgspec.json.decode(msgspec.json.encode(experiment.workload)),  # as it is read again
        faults=tuple(faults),
        capture=experiment.capture or msgspec.UNSET,
        cnp=experiment.cnp or msgspec.UNSET,
        probe=experiment.probe or msgspec.UNSET,
        fabric=msgspec.UNSET
        if (fabric := experiment.fabric) is None
        else PlannedFabric(
            routing=fabric.routing, fidelity=SCHEMES[fabric.routing].fidelity, parameters=fabric.parameters
        ),
        expect=tuple(
            PlannedExpectation(
                metric=bound.metric.name,
                minimum=bound.minimum,
                maximum=bound.maximum,
                equals=bound.equals,
                of=bound.of,
            )
            for bound in experiment.expectations
        )
        or msgspec.UNSET,
        stop=tuple(
            PlannedStop(
                metric=condition.metric.name,
                bound=condition.bound,
                for_ns=condition.for_ns,
                verdict=condition.verdict,
            )
            for condition in experiment.stops
        )
        or msgspec.UNSET,
        bystander=experiment.bystander or msgspec.UNSET,
    )


def _expectation(planned: PlannedExpectation, fault_ids: Sequence[str]) -> Expectation:
    metric = lookup(planned.metric, fault_ids)
    if metric is None:
        raise ValueError(f"expect: no metric {planned.metric}")
    return Expectation(
        metric=metric, minimum=planned.minimum, maximum=planned.maximum, equals=planned.equals, of=planned.of
    )


def _condition(planned: PlannedStop) -> Condition:
    if planned.metric not in METRICS:
        raise ValueError(f"stop: no metric {planned.metric}")
    return Condition(
        metric=METRICS[planned.metric], bound=planned.bound, for_ns=planned.for_ns, verdict=planned.verdict
    )


def encode(decided: Plan) -> bytes:
    """Return the bytes of `plan.json`: sorted keys, two spaces, one newline at the end."""
    return json_text(decided, order="sorted")


def decode(content: bytes) -> Plan:
    """Read `plan.json`.

    Raises:
        msgspec.ValidationError: not a plan of schema 1.
        ValueError: the plan bounds a metric or a live value that does not exist.
    """
    decided = msgspec.json.decode(content, type=Plan)
    _ = decided.expectations, decided.stops
    return decided


def _draw(seed: int, fault_id: str, purpose: str, choices: int) -> int:
    """Return a number in [0, choices). The modulo's bias is below 2**-190 for any number of choices here."""
    digest = hashlib.sha256(f"{seed}/{fault_id}/{purpose}".encode()).digest()
    return int.from_bytes(digest, "big") % choices


def _schedule(fault: Fault, seed: int) -> FaultSpec:
    earliest_ns, latest_ns = fault.at[0], fault.at[-1]
    steps = (latest_ns - earliest_ns) // _MS + 1
    return FaultSpec(
        id=fault.id,
        kind=fault.kind,
        target=fault.targets[_draw(seed, fault.id, "target", len(fault.targets))],
        at_s=(earliest_ns + _draw(seed, fault.id, "at", steps) * _MS) / 1e9,
        for_s=fault.duration_ns / 1e9,
        seed=_draw(seed, fault.id, "seed", 1 << 31),
        exposed=fault.exposed,
        params=fault.parameters,
    )
