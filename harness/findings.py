"""What an attribution can say: the causes, the places, and one attribution. Written into `verdict.json`."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec

__all__ = ["CAUSES", "NOTHING", "PLACES", "Attribution", "Cause", "Place"]

Cause = Literal[
    "link-down",
    "control-plane",
    "mtu",
    "loss",
    "silent-host",
    "congestion",
    "slow-rank",
    "gpu-error",
    "lost-rank",
    "hung-rank",
    "host-reboot",
    "late-receives",
    "slow-storage",
    "low-memory",
    "busy-host",
    "nothing",
]
Place = Literal[
    "rank",
    "gpu",
    "rnic",
    "host-link",
    "rtsw",
    "rtsw-ctsw-link",
    "ctsw",
    "zone-uplink",
    "storage",
    "not-network",
    "none",
]
"""No rule reports `rnic` or `not-network` (neither a switch nor a link) yet; labs that can show them may need them.
`none`: there is no cause, so that there is no place."""
CAUSES: tuple[str, ...] = get_args(Cause)
PLACES: tuple[str, ...] = get_args(Place)
_NETWORK: frozenset[str] = frozenset({"rnic", "host-link", "rtsw", "rtsw-ctsw-link", "ctsw", "zone-uplink"})


class Attribution(msgspec.Struct, frozen=True, kw_only=True):
    """A cause and its place. `name` is the place's name in the topology.

    `confidence` is not a probability. It orders the attributions of a run, and one with less than
    `faultbed.harness.attribution.confusion.CONFIDENT` is too weak to blame its place.
    """

    cause: Cause
    place: Place
    name: str
    confidence: Annotated[float, msgspec.Meta(ge=0, le=1)]
    evidence: tuple[str, ...]

    @property
    def is_network(self) -> bool:
        """Whether the place belongs to the back-end network."""
        return self.place in _NETWORK


NOTHING = Attribution(cause="nothing", place="none", name="", confidence=0.5, evidence=("nothing out of the ordinary",))
