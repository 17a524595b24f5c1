"""What a fault does to a model of the fabric while it is on (`faultbed predict`). Fidelity: modelled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["CUT", "NOTHING", "NO_UPLINKS", "Effect", "EffectOf", "always"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The effect of a fault on capacity, paths, loss or compute. By default the fault has none of them.

    Attributes:
        rate_bps: remaining rate of the target's port, in bits per second; None: its own.
        load_bps: traffic of others to the target's port, in bits per second.
        direction: of packets that `rate_bps`, `load_bps` and `lost` affect: towards the target, or coming from it.
        lost: share of the packets that are lost, each independently.
        cuts: which links of the target carry nothing: those to other switches, or all. Other paths are used at once:
            the time of convergence is not modelled.
        attracts: all that the target's switch sends to other racks takes the target's link.
        compute: share of the GPU's speed that remains.
    """

    rate_bps: float | None = None
    load_bps: float = 0.0
    direction: Literal["to", "from"] = "to"
    lost: float = 0.0
    cuts: Literal["nothing", "uplinks", "all"] = "nothing"
    attracts: bool = False
    compute: float = 1.0


EffectOf = Callable[[Mapping[str, Any]], Effect | None]
"""Return the effect of a fault with these parameters; None: not known with them."""

NOTHING = Effect()
CUT = Effect(cuts="all")
NO_UPLINKS = Effect(cuts="uplinks")


def always(effect: Effect) -> EffectOf:
    """Return the function of a kind whose effect does not depend on its parameters."""
    return lambda _: effect
