"""GPUs: slower than they should be, or gone."""

from __future__ import annotations

from inject.kind import Param, described

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

_THERMAL = described(
    name="gpu.thermal",
    summary="slow a GPU down in a sine wave, as heat does over a day",
    binding={"gpu": "unit"},
    params=(
        Param(name="low", type="number", unit="%", summary="taken away when it is cool", low=1, high=98, default=5),
        Param(name="high", type="number", unit="%", summary="taken away when it is hot", low=2, high=99, default=50),
        Param(name="period", type="number", unit="s", summary="one wave", low=1, high=86_400, default=10),
    ),
    fidelity={"soft": "emulated"},
    armed_by="cpu.max of the GPU's cgroup, read back",
    must_move="nr_throttled of the GPU's cgroup",
    must_not_move="nr_throttled of every other GPU",
    reversible=True,
    colour="#b07bac",
)

_NEIGHBOUR = described(
    name="gpu.noisy-neighbour",
    summary="others compute on the same GPU: it gets one share of several",
    binding={"gpu": "unit"},
    params=(Param(name="neighbours", type="integer", unit="", summary="how many others", low=1, high=16, default=1),),
    fidelity={"soft": "emulated"},
    armed_by="the busy processes in the GPU's cgroup",
    must_move="time that the GPU's process has waited to run, and the busy processes, as a second look finds them",
    must_not_move="nr_throttled of every other GPU",
    reversible=True,
    colour="#735d78",
)

_LOST = described(
    name="gpu.lost",
    summary="fallen off the bus: the GPU is gone in the middle of its work, and comes back only when the fault ends",
    binding={"gpu": "unit"},
    params=(),
    fidelity={"soft": "emulated"},
    armed_by="the GPU's service has no process any more",
    must_move="nothing: the GPU's cgroup is gone, as a second look finds while the fault is on",
    must_not_move="nr_throttled of every other GPU",
    reversible=True,
    colour="#5e3b6d",
)

KINDS = (_THROTTLE, _THERMAL, _NEIGHBOUR, _LOST)
