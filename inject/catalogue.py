"""Fault kinds as data: what each one is called, where it fits, what it takes, and what proves that it happened.

One description has three readers: the planner (`inject.plan`), the holder on the target (through the request that the
planner writes) and the report. A kind that is not here does not exist; `inject.aim` says how each one is done.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from testbed.errors import UsageError

__all__ = ["CATALOGUE", "Binding", "FaultKind", "Fidelity", "Param", "ParamType", "find"]

Fidelity = Literal["real", "emulated", "modelled"]
"""`real`: real cause and effect; `emulated`: real symptom, another cause; `modelled`: no packet shows it."""

Binding = Literal["fd", "unit", "local"]
"""Who reverts when the holder dies: the kernel with its socket, PID 1 of the target, or the guardian beside QEMU."""

ParamType = Literal["number", "integer", "psn", "qpn", "choice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One parameter: its unit, its closed range `low`..`high` (None: open), its default (None: left out)."""

    name: str
    type: ParamType
    unit: str
    summary: str
    low: float | None = None
    high: float | None = None
    default: float | str | None = None
    choices: tuple[str, ...] = ()
    required: bool = False

    @property
    def range(self) -> str:
        """The range as a person reads it."""
        if self.type == "choice":
            return " | ".join(self.choices)
        if self.type == "psn":
            return "0..16777215 or +1..+8388607"
        if self.type == "qpn":
            return "1..16777215 or any"
        low = "" if self.low is None else f"{self.low:g}"
        high = "" if self.high is None else f"{self.high:g}"
        return f"{low}..{high}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """A kind of fault.

    `binding` maps each kind of target it fits (`testbed.topology.Target.kind`) to who reverts; `fidelity` maps each
    kind of lab that can do it to what it is worth there. The three `*_by`/`must_*` texts are for people; the exact
    counters are chosen for the target by the planner.
    """

    name: str
    summary: str
    binding: Mapping[str, Binding]
    params: tuple[Param, ...]
    fidelity: Mapping[str, Fidelity]
    armed_by: str
    must_move: str
    must_not_move: str
    reversible: bool
    colour: str

    @property
    def targets(self) -> tuple[str, ...]:
        """Kinds of target this kind fits."""
        return tuple(self.binding)

    def param(self, name: str) -> Param | None:
        """The parameter of that name."""
        return next((param for param in self.params if param.name == name), None)


def _kind(*, binding: Mapping[str, Binding], fidelity: Mapping[str, Fidelity], **rest: object) -> FaultKind:
    return FaultKind(
        binding=MappingProxyType(dict(binding)),
        fidelity=MappingProxyType(dict(fidelity)),
        **rest,  # type: ignore[arg-type]
    )


_LINK_FLAP = _kind(
    name="link.flap",
    summary="take a link down and up again: once for the whole window, or as a train of flaps",
    binding={"port": "unit", "rnic": "local"},
    params=(
        Param(name="period", type="number", unit="s", summary="from one down to the next", low=0.05, high=3600),
        Param(
            name="duty",
            type="number",
            unit="",
            summary="share of each period spent down",
            low=0.01,
            high=0.99,
            default=0.5,
        ),
        Param(name="count", type="integer", unit="", summary="flaps, at most", low=1, high=100_000),
    ),
    fidelity={"soft": "emulated"},
    armed_by="interface flags read back in the switch (port), QMP's acknowledgement (RNIC)",
    must_move="carrier_down_count of the other end (uplink), carrier_changes of the host (RNIC), "
    "retransmissions at a host (host port)",
    must_not_move="rxe send_err",
    reversible=True,
    colour="#d1495b",
)

_PACKET_DROP = _kind(
    name="packet.drop",
    summary="lose RoCEv2 packets in the fabric: a random share, or exactly one by destination QP and PSN",
    binding={"port": "fd", "rnic": "fd"},
    params=(
        Param(name="share", type="number", unit="", summary="share of packets, at random", low=0.000001, high=1),
        Param(name="psn", type="psn", unit="", summary="this packet once; +N counts from the next expected one"),
        Param(name="qp", type="qpn", unit="", summary="destination QP number; any: the lowest connected one"),
        Param(
            name="direction",
            type="choice",
            unit="",
            summary="towards the target or coming from it",
            choices=("to", "from"),
            default="to",
        ),
    ),
    fidelity={"soft": "real"},
    armed_by="the nftables table and its hook, listed back",
    must_move="out_of_seq_request, rcvd_seq_err or completer_retry_err at an RNIC",
    must_not_move="rxe send_err",
    reversible=True,
    colour="#edae49",
)

_GPU_THROTTLE = _kind(
    name="gpu.throttle",
    summary="slow a GPU down by a percentage",
    binding={"gpu": "unit"},
    params=(
        Param(
            name="percent",
            type="number",
            unit="%",
            summary="taken away: 50 leaves half",
            low=1,
            high=99,
            required=True,
        ),
    ),
    fidelity={"soft": "emulated"},
    armed_by="cpu.max of the GPU's cgroup, read back",
    must_move="nr_throttled of the GPU's cgroup",
    must_not_move="nr_throttled of every other GPU",
    reversible=True,
    colour="#8f5aa8",
)

CATALOGUE: Mapping[str, FaultKind] = MappingProxyType(
    {kind.name: kind for kind in (_LINK_FLAP, _PACKET_DROP, _GPU_THROTTLE)}
)
"""Every kind, by name."""


def find(name: str, *, where: str = "kind") -> FaultKind:
    """The kind of that name.

    Raises:
        UsageError: there is none; the message starts with `where` and names the nearest.
    """
    if name in CATALOGUE:
        return CATALOGUE[name]
    near = difflib.get_close_matches(name, list(CATALOGUE), n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(CATALOGUE)}"
    raise UsageError(f'{where}: no fault kind "{name}"; {hint}')
