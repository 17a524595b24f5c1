"""GPUs: throttled, lost, or with error events."""

from __future__ import annotations

from inject.kinds.kind import Example, Param, Trait, described

__all__ = ["KINDS"]

_THROTTLE = described(
    name="gpu.throttle",
    summary="slow a GPU down by a percentage",
    binding={"gpu": "unit"},
    params=(
        Param(
            name="percent",
            type="number",
            unit="%",
            summary="reduction: 50 leaves half",
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
    traits=frozenset({Trait.NO_PACKET}),
    example=Example(target="host1:gpu0", params={"percent": 50}),
    colour="#8f5aa8",
)

_THERMAL = described(
    name="gpu.thermal",
    summary="slow a GPU down in a sine wave, as heat does over a day",
    binding={"gpu": "unit"},
    params=(
        Param(name="low", type="number", unit="%", summary="reduction when it is cool", low=1, high=98, default=5),
        Param(name="high", type="number", unit="%", summary="reduction when it is hot", low=2, high=99, default=50),
        Param(name="period", type="number", unit="s", summary="period of the wave", low=1, high=86_400, default=10),
    ),
    fidelity={"soft": "emulated"},
    armed_by="cpu.max of the GPU's cgroup, read back",
    must_move="nr_throttled of the GPU's cgroup",
    must_not_move="nr_throttled of every other GPU",
    reversible=True,
    traits=frozenset({Trait.NO_PACKET}),
    example=Example(target="host1:gpu0"),
    colour="#b07bac",
)

_NEIGHBOUR = described(
    name="gpu.noisy-neighbour",
    summary="other processes compute on the same GPU and share its time",
    binding={"gpu": "unit"},
    params=(
        Param(
            name="neighbours", type="integer", unit="", summary="number of other processes", low=1, high=16, default=1
        ),
    ),
    fidelity={"soft": "emulated"},
    armed_by="the busy processes in the GPU's cgroup",
    must_move="time that the GPU's process waited to run, and the busy processes, counted independently of the holder",
    must_not_move="nr_throttled of every other GPU",
    reversible=True,
    example=Example(target="host1:gpu0"),
    colour="#735d78",
)

_LOST = described(
    name="gpu.lost",
    summary="the GPU falls off the bus during its work, and comes back only when the fault ends",
    binding={"gpu": "unit"},
    params=(),
    fidelity={"soft": "emulated"},
    armed_by="the GPU's service has no process",
    must_move="no counter; proof is that the GPU's cgroup is gone, read while the fault is on, "
    "independently of the holder",
    must_not_move="nr_throttled of every other GPU",
    reversible=True,
    traits=frozenset({Trait.WHOLE_TARGET, Trait.BUS_RESCAN, Trait.NO_PACKET}),
    may_fail=("workload",),
    example=Example(target="host1:gpu0"),
    colour="#5e3b6d",
)

_XID = described(
    name="gpu.xid",
    summary="error events of a GPU (XID) as monitoring sees them, once or repeatedly; "
    "synthetic, without any effect on the GPU",
    binding={"gpu": "unit"},
    params=(
        Param(
            name="xid",
            type="integer",
            unit="",
            summary="the event's number: 48 and 63 are memory errors, 79 fallen off the bus",
            low=1,
            high=200,
            default=79,
        ),
        Param(name="period", type="number", unit="s", summary="time from event to event", low=0.05, high=3600),
        Param(name="count", type="integer", unit="", summary="number of events at most", low=1, high=100_000),
    ),
    fidelity={"soft": "modelled"},
    armed_by="the event, read back from where monitoring reads it: the kernel's log, or DCGM",
    must_move="events of this GPU in the kernel's log (soft lab)",
    must_not_move="events of every other GPU",
    reversible=True,
    traits=frozenset({Trait.LOG_ONLY, Trait.NO_PACKET}),
    example=Example(target="host1:gpu0", params={"period": 0.25, "count": 2}),
    colour="#94d2bd",
)

KINDS = (_THROTTLE, _THERMAL, _NEIGHBOUR, _LOST, _XID)
