"""The section `[fabric]` of an experiment: which routing scheme the lab's switches have while the workload runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from faultbed.harness.strict import Section, fail, one_of
from faultbed.testbed.routing.schemes import SCHEMES, Routing

__all__ = ["KEYS", "Fabric", "FabricFile", "fabric_of"]

_TAKEN_BY = {scheme.parameter: scheme.name for scheme in SCHEMES.values() if scheme.parameter}
KEYS = ("routing", *_TAKEN_BY)
_LONGEST_SEED = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """A routing scheme, and the parameters of all schemes.

    `qp_hash_seed` is the seed of the hash of the destination queue pair (e-ecmp). `weights` are shares of links by name
    (weighted); a link that is not named has 1. `buckets` is the number of buckets of a next-hop group (resilient).
    """

    routing: str
    qp_hash_seed: int = 1
    weights: dict[str, int] = field(default_factory=dict)
    buckets: int = 128

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters that this scheme takes."""
        name = SCHEMES[self.routing].parameter
        return {name: getattr(self, name)} if name else {}

    @property
    def as_routing(self) -> Routing:
        """The parameters as the scheme's functions take them."""
        weights = {name: float(share) for name, share in self.weights.items()}
        return Routing(seed=self.qp_hash_seed, weights=weights, buckets=self.buckets)


class FabricFile(Section, frozen=True, kw_only=True):
    """The section as written."""

    routing: str
    qp_hash_seed: Annotated[int, msgspec.Meta(ge=1, le=_LONGEST_SEED)] | None = None
    weights: dict[str, Annotated[int, msgspec.Meta(ge=1, le=256)]] | None = None
    buckets: Annotated[int, msgspec.Meta(ge=2, le=4096)] | None = None


def fabric_of(section: FabricFile | None, source: str) -> Fabric | None:
    """Read the section; None: there is none.

    Raises:
        ConfigError: no such scheme, or a parameter that belongs to another one.
    """
    if section is None:
        return None
    one_of(section.routing, tuple(SCHEMES), source, "fabric.routing")
    parameters = {name: value for name in _TAKEN_BY if (value := getattr(section, name)) is not None}
    for name in parameters:
        if _TAKEN_BY[name] != section.routing:
            problem = f"is a parameter of {_TAKEN_BY[name]}, not of {section.routing}; remove it"
            raise fail(source, f"fabric.{name}", problem)
    return Fabric(routing=section.routing, **parameters)
