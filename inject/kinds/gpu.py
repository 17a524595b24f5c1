"""Fault kinds of GPUs: less compute time, loss, heat, error events (XID) and memory errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from faultbed.inject.kinds.effect import NOTHING, Effect, always
from faultbed.inject.kinds.kind import Example, Param, Trait, described
from faultbed.testbed.node.gpu.health import SHUTDOWN_C, SLOWDOWN_C

__all__ = ["KINDS"]


def _throttled(params: Mapping[str, Any]) -> Effect:
    return Effect(compute=1 - float(params["percent"]) / 100)


def _mean_of_wave(params: Mapping[str, Any]) -> Effect:
    return Effect(compute=1 - (float(params["low"]) + float(params["high"])) / 200)


def _shared(params: Mapping[str, Any]) -> Effect:
    return Effect(compute=1 / (1 + int(params["neighbours"])))


_THROTTLE = described(
    name="gpu.throttle",
    summary="slow a GPU down by a percentage",
    binding={"gpu": "unit"},
    params=(
        Param(
            name="percent",
            type="number",
            unit="%",
            summary="reduction; 50 leaves half of the speed",
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
    effect=_throttled,
)

_THERMAL = described(
    name="gpu.thermal",
    summary="slow a GPU down in a sine wave, as the heat of a day does",
    binding={"gpu": "unit"},
    params=(
        Param(
            name="low",
            type="number",
            unit="%",
            summary="smallest reduction, while the GPU is cool",
            low=1,
            high=98,
            default=5,
        ),
        Param(
            name="high",
            type="number",
            unit="%",
            summary="largest reduction, while the GPU is hot",
            low=2,
            high=99,
            default=50,
        ),
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
    effect=_mean_of_wave,
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
    effect=_shared,
)

_LOST = described(
    name="gpu.lost",
    summary="the GPU falls off the bus while it computes, and comes back when the fault ends",
    binding={"gpu": "unit"},
    params=(),
    fidelity={"soft": "emulated"},
    armed_by="the service of the GPU no longer has a process",
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
            summary="number of the event, such as 48 or 63 (memory errors) or 79 (fallen off the bus)",
            low=1,
            high=200,
            default=79,
        ),
        Param(name="period", type="number", unit="s", summary="time from event to event", low=0.05, high=3600),
        Param(name="count", type="integer", unit="", summary="maximum number of events", low=1, high=100_000),
    ),
    fidelity={"soft": "modelled"},
    armed_by="the event, read back from where monitoring reads it: the kernel's log, or DCGM",
    must_move="events of this GPU in the kernel's log (soft lab)",
    must_not_move="events of every other GPU",
    reversible=True,
    traits=frozenset({Trait.LOG_ONLY, Trait.NO_PACKET}),
    example=Example(target="host1:gpu0", params={"period": 0.25, "count": 2}),
    colour="#94d2bd",
    effect=always(NOTHING),
)


def _is_corrected(params: Mapping[str, Any]) -> bool:
    return params.get("error") in ("corrected", "high-rate")


def _is_below_shutdown(params: Mapping[str, Any]) -> bool:
    return float(params.get("celsius", SHUTDOWN_C)) < SHUTDOWN_C


def _heated(params: Mapping[str, Any]) -> Effect | None:
    if not _is_below_shutdown(params):
        return None
    return NOTHING if float(params["celsius"]) < SLOWDOWN_C else Effect(compute=0.5)


_ECC = described(
    name="gpu.ecc",
    summary="memory errors in a GPU's ECC counters, with their XID; a contained error ends the program that meets it, "
    "an uncontained error ends every program until the end of the fault, which acts as a GPU reset",
    binding={"gpu": "unit"},
    params=(
        Param(
            name="error",
            type="choice",
            unit="",
            summary="high-rate: corrected errors, so many that the driver reports them (XID 92); contained: XID 94; "
            "uncontained: XID 95",
            choices=("corrected", "high-rate", "contained", "uncontained"),
            default="contained",
        ),
        Param(name="count", type="integer", unit="", summary="errors at the onset", low=1, high=100_000, default=1),
        Param(name="rate", type="number", unit="1/s", summary="further errors per second", low=0, high=1000, default=0),
    ),
    fidelity={"soft": "emulated"},
    armed_by="the error, read back from the GPU's synthetic registers",
    must_move="aggregate ECC errors of this GPU, as NVML counts them, and its events in the kernel's log",
    must_not_move="ECC errors of every other GPU",
    reversible=True,
    traits=frozenset({Trait.NO_PACKET}),
    may_fail=("workload",),
    is_mild=_is_corrected,
    example=Example(target="host1:gpu0", params={"error": "contained"}),
    colour="#9b2226",
    effect=lambda params: NOTHING if _is_corrected(params) else None,
)

_ROW_REMAP = described(
    name="gpu.row-remap",
    summary="a row of a GPU's memory waits to be remapped at the next reset, or could not be remapped; as monitoring "
    "sees it, without any effect on programs",
    binding={"gpu": "unit"},
    params=(
        Param(
            name="state",
            type="choice",
            unit="",
            summary="pending: XID 63; failed: XID 64, and the GPU is to be replaced",
            choices=("pending", "failed"),
            default="pending",
        ),
    ),
    fidelity={"soft": "modelled"},
    armed_by="the flag, read back from the GPU's synthetic registers",
    must_move="remapped rows (if pending) and events of this GPU; its flag, read while the fault is on",
    must_not_move="remapped rows of every other GPU",
    reversible=True,
    traits=frozenset({Trait.NO_PACKET}),
    example=Example(target="host1:gpu0"),
    colour="#ca6702",
    effect=always(NOTHING),
)

_OVERHEAT = described(
    name="gpu.overheat",
    summary="a GPU becomes hot: below 89 °C it only reports the temperature, from 89 °C it halves its speed, from 95 "
    "°C it is lost (thresholds of an H100)",
    binding={"gpu": "unit"},
    params=(
        Param(
            name="celsius", type="integer", unit="°C", summary="temperature of the GPU", low=46, high=120, required=True
        ),
    ),
    fidelity={"soft": "emulated"},
    armed_by="the temperature, read back from the GPU's synthetic registers; cpu.max of its cgroup, or no process",
    must_move="below 89 °C: no counter, the temperature is read while the fault is on; from 89 °C: nr_throttled and "
    "the time of thermal slowdown; from 95 °C: events of this GPU, and its cgroup is gone",
    must_not_move="nr_throttled of every other GPU, and below 89 °C also of this GPU",
    reversible=True,
    traits=frozenset({Trait.WHOLE_TARGET, Trait.NO_PACKET}),
    may_fail=("workload",),
    is_mild=_is_below_shutdown,
    example=Example(target="host1:gpu0", params={"celsius": 92}),
    colour="#bb3e03",
    effect=_heated,
)

KINDS = (_THROTTLE, _THERMAL, _NEIGHBOUR, _LOST, _XID, _ECC, _ROW_REMAP, _OVERHEAT)
