"""Fault kinds of rack labs only: a soft GPU has no power limit. Not yet run on hardware."""

from __future__ import annotations

from faultbed.inject.kinds.kind import Example, Param, Trait, described

__all__ = ["KINDS"]

_POWER_CAP = described(
    name="gpu.power-cap",
    summary="limit a GPU's power: it slows down at that limit",
    binding={"gpu": "unit"},
    params=(
        Param(
            name="percent",
            type="number",
            unit="%",
            summary="reduction of the default limit: 30 leaves 70 %",
            low=1,
            high=90,
            required=True,
        ),
    ),
    fidelity={},
    armed_by="power.limit, read back",
    must_move="the event reason `software power cap`, read while the fault is on, independently of the holder",
    must_not_move="no counter is declared yet",
    reversible=True,
    traits=frozenset({Trait.NO_PACKET}),
    example=Example(target="host1:gpu0", params={"percent": 30}),
    colour="#ae2012",
    tried=(),
)

KINDS = (_POWER_CAP,)
