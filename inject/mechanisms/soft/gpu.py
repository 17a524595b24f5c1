"""Mechanisms of GPU faults on the soft lab, where a GPU is a compute process in its own cgroup."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from faultbed.inject.mechanisms.mechanism import Mechanism, Request, Step, Witness, flap_edges, holder_request, on_host
from faultbed.testbed.errors import UsageError
from faultbed.testbed.node.gpu.health import IDLE_C, SHUTDOWN_C, SLOWDOWN_C, Health

__all__ = ["BY_KIND"]

CGROUP_ROOT = "/sys/fs/cgroup/faultbed.slice"
THROTTLE_PERIOD_US = 10_000
"""Period of a CPU quota. It is short, so that the limit also acts on compute bursts of a few milliseconds."""
MIN_QUOTA_US = 1_000
"""The kernel refuses a smaller quota (kernel/sched/core.c, min_cfs_quota_period)."""
HEAT_DIVISOR = 2
"""Hot hardware divides its clocks by at least this number (NVML, nvmlClocksEventReasonHwSlowdown)."""
_MIN_SLOWED_SHARE = 0.05
"""The GPU must have been slowed down, or have waited, for at least this share of the window. Otherwise it was idle."""


def _throttle(request: Request) -> Mechanism:
    left = (100 - request.spec.params["percent"]) / 100
    period_us = max(THROTTLE_PERIOD_US, round(MIN_QUOTA_US / left))
    return _cpu_quota(request, f"{round(period_us * left)} {period_us}", {})


def _thermal(request: Request) -> Mechanism:
    shallow, deep = sorted((request.spec.params["low"], request.spec.params["high"]))
    if shallow == deep:
        raise UsageError(
            f"{request.where}.high: a wave from {shallow:g} % to {deep:g} % is flat; change it, or use gpu.throttle"
        )
    period_us = max(THROTTLE_PERIOD_US, round(MIN_QUOTA_US / ((100 - deep) / 100)))
    middle, swing = (100 - (shallow + deep) / 2) / 100, (deep - shallow) / 200
    wave = {"swing_us": int(period_us * swing), "wave_s": request.spec.params["period"]}
    return _cpu_quota(request, f"{round(period_us * middle)} {period_us}", wave)


def _cpu_quota(request: Request, value: str, wave: dict[str, Any]) -> Mechanism:
    """Return the mechanism that writes `value` ("QUOTA PERIOD", in µs) to the cpu.max of the GPU's cgroup."""
    name, cgroup = _gpu(request)
    return Mechanism(
        place=on_host(request),
        request=holder_request(request, "cgroup", {"cgroup": cgroup, "value": value, **wave}, claims=cgroup),
        steps=(Step(do=f"echo {value} > {cgroup}/cpu.max", undo=f"echo max 100000 > {cgroup}/cpu.max"),),
        must_move=(Witness(any_of=(f"{name}.nr_throttled",)),),
        must_not_move=_other_gpus(request, "nr_throttled"),
        restored=((f"{name}.quota_us", -1),),
        shows={"cgroup": cgroup},
    )


def _noisy_neighbour(request: Request) -> Mechanism:
    name, cgroup = _gpu(request)
    count = request.spec.params["neighbours"]
    waited_us = round(request.spec.for_s * _MIN_SLOWED_SHARE * 1e6)
    return Mechanism(
        place=on_host(request),
        request=holder_request(
            request, "hog", {"count": count, "share": 1.0, "cgroup": cgroup}, claims=f"{request.target.node}/hog"
        ),
        steps=(
            Step(do=f"sh -c 'while :; do :; done' &   # {count} times, into {cgroup}/cgroup.procs", undo="kill %1"),
        ),
        must_move=(Witness(any_of=(f"{name}.wait_us",), at_least=waited_us),),
        must_not_move=_other_gpus(request, "nr_throttled"),
        shows={"cgroup": cgroup},
        while_on=((f"{request.target.node}/hogs.running", count),),
        restored=((f"{request.target.node}/hogs.running", 0),),
    )


def _lost(request: Request) -> Mechanism:
    name, cgroup = _gpu(request)
    unit = cgroup.rpartition("/")[2]
    return Mechanism(
        place=on_host(request),
        request=holder_request(request, "service", {"unit": unit, "cgroup": cgroup}, claims=cgroup),
        steps=(Step(do=f"systemctl kill -s KILL {unit}", undo=f"systemctl start {unit}"),),
        must_move=(),
        must_not_move=_other_gpus(request, "nr_throttled"),
        restored=((f"{name}.quota_us", -1),),
        shows={"cgroup": cgroup},
        while_on=((f"{name}.quota_us", None),),
    )


def _xid(request: Request) -> Mechanism:
    name, _ = _gpu(request)
    gpu = name.partition("/")[2]
    edges = flap_edges(request)
    return Mechanism(
        place=on_host(request),
        request=holder_request(
            request, "xid", {"gpu": gpu, "xid": request.spec.params["xid"]}, claims=f"{name}/xid", edges=edges
        ),
        steps=(
            Step(
                do=f"echo '<3>NVRM: Xid (PCI:{gpu}): {request.spec.params['xid']}, synthetic' > /dev/kmsg",
                undo="# (nothing: an event cannot be undone)",
            ),
        ),
        must_move=(Witness(any_of=(f"{name}.xids",), at_least=sum(on for _, on in edges)),),
        must_not_move=_other_gpus(request, "xids"),
        shows={"gpu": gpu},
        # An event has no duration, so that the fault is complete as soon as all events are written.
        complete_after=sum(on for _, on in edges),
    )


def _ecc(request: Request) -> Mechanism:
    name, _ = _gpu(request)
    gpu = name.partition("/")[2]
    error, count, rate = (request.spec.params[param] for param in ("error", "count", "rate"))
    counter = "ecc_corrected" if error in ("corrected", "high-rate") else "ecc_uncorrected"
    # Only half of the errors at `rate` are required: the first is due after 1 / rate, and a starved holder is late.
    at_least = count + int(rate * request.spec.for_s / 2)
    event = () if error == "corrected" else (Witness(any_of=(f"{name}.xids",)),)
    return Mechanism(
        place=on_host(request),
        request=holder_request(
            request, "gpu_memory", {"gpu": gpu, "error": error, "count": count, "rate": rate}, claims=f"{name}/memory"
        ),
        steps=(_registers(gpu, "memory", f"{counter} + {count:g}, {error}"),),
        must_move=(Witness(any_of=(f"{name}.{counter}_total",), at_least=at_least), *event),
        must_not_move=_other_gpus(request, f"{counter}_total"),
        restored=((f"{name}.{counter}", 0),),
        shows={"gpu": gpu},
    )


def _row_remap(request: Request) -> Mechanism:
    name, _ = _gpu(request)
    gpu, remap = name.partition("/")[2], request.spec.params["state"]
    register = f"{name}.remap_{remap}"
    remapped = (Witness(any_of=(f"{name}.remapped_rows",)),) if remap == "pending" else ()
    return Mechanism(
        place=on_host(request),
        request=holder_request(request, "gpu_rows", {"gpu": gpu, "remap": remap}, claims=f"{name}/rows"),
        steps=(_registers(gpu, "rows", f"remap_{remap} 1"),),
        must_move=(*remapped, Witness(any_of=(f"{name}.xids",))),
        must_not_move=_other_gpus(request, "remapped_rows"),
        while_on=((register, 1),),
        restored=((register, 0),),
        shows={"gpu": gpu},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeatEffect:
    """What a temperature does to a GPU, besides being reported. The fields are those of `Mechanism`."""

    steps: tuple[Step, ...] = ()
    must_move: tuple[Witness, ...] = ()
    must_not_move: tuple[str, ...] = ()
    while_on: tuple[tuple[str, int | None], ...]


def _overheat(request: Request) -> Mechanism:
    name, cgroup = _gpu(request)
    gpu, celsius = name.partition("/")[2], int(request.spec.params["celsius"])
    slow = f"{THROTTLE_PERIOD_US // HEAT_DIVISOR} {THROTTLE_PERIOD_US}"
    effect = _heat_effect(request, celsius, slow)
    args = {"gpu": gpu, "celsius": celsius, "unit": cgroup.rpartition("/")[2], "cgroup": cgroup, "slow": slow}
    return Mechanism(
        place=on_host(request),
        request=holder_request(request, "gpu_heat", args, claims=cgroup),
        steps=(_registers(gpu, "heat", f"temp_c {celsius}"), *effect.steps),
        must_move=effect.must_move,
        must_not_move=(
            *effect.must_not_move,
            *_other_gpus(request, "nr_throttled"),
            *_other_gpus(request, "thermal_slowdown_us"),
        ),
        while_on=effect.while_on,
        restored=((f"{name}.temp_c", IDLE_C), (f"{name}.quota_us", -1)),
        shows={"gpu": gpu},
    )


def _heat_effect(request: Request, celsius: int, slow: str) -> _HeatEffect:
    """Return the effect of a temperature: the GPU is lost, slowed down to the quota `slow`, or not affected."""
    name, cgroup = _gpu(request)
    if celsius >= SHUTDOWN_C:
        unit = cgroup.rpartition("/")[2]
        return _HeatEffect(
            steps=(Step(do=f"systemctl kill -s KILL {unit}", undo=f"systemctl start {unit}"),),
            must_move=(Witness(any_of=(f"{name}.xids",)),),
            while_on=((f"{name}.quota_us", None),),
        )
    temperature = ((f"{name}.temp_c", celsius),)
    if celsius >= SLOWDOWN_C:
        slowed_us = round(request.spec.for_s * _MIN_SLOWED_SHARE * 1e6)
        return _HeatEffect(
            steps=(Step(do=f"echo {slow} > {cgroup}/cpu.max", undo=f"echo max 100000 > {cgroup}/cpu.max"),),
            must_move=(
                Witness(any_of=(f"{name}.nr_throttled",)),
                Witness(any_of=(f"{name}.thermal_slowdown_us",), at_least=slowed_us),
            ),
            while_on=temperature,
        )
    return _HeatEffect(must_not_move=(f"{name}.nr_throttled", f"{name}.thermal_slowdown_us"), while_on=temperature)


def _registers(gpu: str, part: str, values: str) -> Step:
    """Return the step that sets synthetic registers of a GPU, in the file from which the watcher reads them."""
    return Step(do=f"# (synthetic registers of {gpu}'s {part}: {values})", undo=f"rm -f {Health(gpu).file(part)}")


def _gpu(request: Request) -> tuple[str, str]:
    """Return the name of the target GPU as in counters (`host1/gpu0`), and the path of its cgroup."""
    target = request.target
    if target.gpu is None:
        raise UsageError(f"{request.where}.target: {target.text} is not a GPU; name one, such as host1:gpu0")
    return f"{target.node}/{target.gpu.name}", f"{CGROUP_ROOT}/faultbed-{target.gpu.name}.service"


def _other_gpus(request: Request, counter: str) -> tuple[str, ...]:
    target = request.target
    return tuple(
        f"{host.name}/{gpu.name}.{counter}"
        for host in request.topology.hosts
        for gpu in host.gpus
        if target.gpu is None or (host.name, gpu.name) != (target.node, target.gpu.name)
    )


BY_KIND: Mapping[str, Callable[[Request], Mechanism]] = {
    "gpu.throttle": _throttle,
    "gpu.thermal": _thermal,
    "gpu.noisy-neighbour": _noisy_neighbour,
    "gpu.lost": _lost,
    "gpu.xid": _xid,
    "gpu.ecc": _ecc,
    "gpu.row-remap": _row_remap,
    "gpu.overheat": _overheat,
}
