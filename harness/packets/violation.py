"""A broken rule of the transport, as the checks of a flow return it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from faultbed.testbed.packets.columns import Packets

__all__ = ["Violation", "violation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A broken rule: the frame in the file and an explanation. `psn` has 24 bits, as on the wire."""

    rule: str
    frame: int
    time_ns: int
    psn: int
    detail: str


def violation(packets: Packets, rule: str, at: int, detail: str) -> Violation:
    """Return the violation of a rule by packet number `at` of the capture."""
    return Violation(
        rule=rule,
        frame=int(packets.number[at]),
        time_ns=int(packets.time_ns[at]),
        psn=int(packets.psn[at]),
        detail=detail,
    )
