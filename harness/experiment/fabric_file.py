"""The section `[fabric]` of an experiment: which routing scheme the lab's switches have while the workload runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from faultbed.harness.experiment.declare.field_types import Choice, Count, Duration, Flag
from faultbed.harness.experiment.declare.section import Named, Section
from faultbed.testbed.routing.schemes import SCHEMES, Routing

__all__ = ["Fabric", "FabricSection"]

_TAKEN_BY = {parameter: scheme.name for scheme in SCHEMES.values() for parameter in scheme.parameters}
_LONGEST_SEED = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """A routing scheme, and the parameters of all schemes.

    `qp_hash_seed` is the seed of the hash of the destination queue pair (e-ecmp). `weights` are shares of links by name
    (weighted); a link that is not named has 1. `buckets` is the number of buckets of a next-hop group (resilient).

    Of te: `cycle` is the time in s from one placement to the next. `backdoor`: a change that a switch reports causes
    one at once. `demand`: what is placed, the bytes of the workload's schedule or those that ports counted.
    """

    routing: str
    qp_hash_seed: int = 1
    weights: dict[str, int] = field(default_factory=dict)
    buckets: int = 128
    cycle: float = 5.0
    backdoor: bool = True
    demand: Literal["schedule", "measured"] = "schedule"

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters that this scheme takes."""
        words = {"cycle": f"{self.cycle:g}s"}
        return {name: words.get(name, getattr(self, name)) for name in SCHEMES[self.routing].parameters}

    @property
    def as_routing(self) -> Routing:
        """The parameters as the scheme's functions take them."""
        weights = {name: float(share) for name, share in self.weights.items()}
        return Routing(seed=self.qp_hash_seed, weights=weights, buckets=self.buckets)


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricSection(Section):
    """`[fabric]` as written. None: the default of the scheme that takes the parameter."""

    routing: Annotated[
        str, Choice("Routing scheme that the switches apply while the workload runs.", among=tuple(SCHEMES))
    ]
    qp_hash_seed: Annotated[
        int | None,
        Count("Seed of the hash of the destination queue pair (e-ecmp); default 1.", least=1, most=_LONGEST_SEED),
    ] = None
    weights: Annotated[
        dict[str, int] | None,
        Named(
            "Shares of links by name (weighted); a link that is not named has 1.",
            of=Count("Share of a link.", least=1, most=256),
        ),
    ] = None
    buckets: Annotated[
        int | None, Count("Buckets of a next-hop group (resilient); default 128.", least=2, most=4096)
    ] = None
    cycle: Annotated[
        float | None,
        Duration("Time from one placement of flows to the next (te); default 5s.", key="cycle", to="s", least=1),
    ] = None
    backdoor: Annotated[
        bool | None,
        Flag("Place flows as soon as a switch reports a change of links or routes (te); default true."),
    ] = None
    demand: Annotated[
        Literal["schedule", "measured"] | None,
        Choice(
            "Bytes that are placed (te): of the workload's schedule, or as ports counted them in the last cycle; "
            "default schedule.",
            among=("schedule", "measured"),
        ),
    ] = None

    def problems(self) -> Iterable[tuple[str, str]]:
        """Return parameters that belong to another scheme."""
        for name in self._given():
            if _TAKEN_BY[name] != self.routing:
                yield name, f"is a parameter of {_TAKEN_BY[name]}, not of {self.routing}; remove it"

    def decoded(self, source: str) -> Fabric:  # noqa: ARG002
        """Return the scheme with the parameters of all schemes."""
        return Fabric(routing=self.routing, **self._given())

    def _given(self) -> dict[str, Any]:
        return {name: value for name in _TAKEN_BY if (value := getattr(self, name)) is not None}
