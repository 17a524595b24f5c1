"""Fault kinds of rack labs only: a soft GPU has no power limit, and a virtual link neither FEC nor PFC.

Not yet run on hardware.
"""

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

_FEC = described(
    name="link.fec",
    summary="an RNIC receives with bit errors that FEC corrects: the link is up and loses nothing, but has less margin",
    binding={"rnic": "unit"},
    params=(
        Param(
            name="offset",
            type="integer",
            unit="",
            summary="new offset of the receiver's sampling point (mixer_offset0); begin near the present one, because "
            "the link fails if it is too far",
            low=0,
            high=0x7FF,
            required=True,
        ),
    ),
    fidelity={},
    armed_by="the offset, read back from the firmware",
    must_move="rx_corrected_bits_phy of the RNIC's port, by more than a BER of 1e-5 explains",
    must_not_move="no counter, because the port is toggled at the end; afterwards the rates of corrected bits and of "
    "errors beyond FEC are as before",
    reversible=True,
    traits=frozenset({Trait.LINK_STATE, Trait.CARRIER, Trait.ROUTES}),
    example=Example(target="host1:mlx5_0", params={"offset": 40}),
    colour="#5f0f40",
    tried=(),
)

_PFC_STORM = described(
    name="congestion.pfc-storm",
    summary="a host, or a port of a Linux switch, sends bursts of PFC pause frames, so that its neighbour stops "
    "sending in this priority; congestion spreads from there to other senders",
    binding={"rnic": "unit", "port": "unit"},
    params=(
        Param(name="priority", type="integer", unit="", summary="priority to pause", low=0, high=7, default=3),
        Param(
            name="burst",
            type="number",
            unit="ms",
            summary="how long each burst pauses; below 100 ms, the shortest time after which a PFC watchdog acts",
            low=1,
            high=80,
            default=20,
        ),
        Param(
            name="period",
            type="number",
            unit="ms",
            summary="time from burst to burst; at least 20 ms more than the burst",
            low=21,
            high=10_000,
            default=200,
        ),
    ),
    fidelity={},
    armed_by="the sending process in /proc",
    must_move="pause frames that the neighbour's port counts (asic_rx_pause of SONiC, rx_prioN_pause of an RNIC)",
    must_not_move="no counter is declared yet",
    reversible=True,
    traits=frozenset({Trait.SPREADS, Trait.ROUTES}),
    example=Example(target="host1:mlx5_0", params={"burst": 20}),
    colour="#9a031e",
    tried=(),
)

KINDS = (_POWER_CAP, _FEC, _PFC_STORM)
