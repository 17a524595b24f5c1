"""Faults of GPUs: slower by a percentage, by a wave, or by a neighbour; gone; with errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from inject.mechanisms.mechanism import Request, Shot, Step, Witness, held, on_host, trains
from testbed.errors import UsageError

__all__ = ["BY_KIND"]

CGROUP_ROOT = "/sys/fs/cgroup/faultbed.slice"
# A period this short lets compute bursts of a few milliseconds feel the limit; the kernel refuses a quota below 1 ms
# (kernel/sched/core.c, min_cfs_quota_period).
THROTTLE_PERIOD_US = 10_000
MIN_QUOTA_US = 1_000
# The GPU must have waited for its neighbours at least this share of the window: else it had nothing to do.
_ROBBED = 0.05


def _throttle(asked: Request) -> Shot:
    left = (100 - asked.params["percent"]) / 100
    period_us = max(THROTTLE_PERIOD_US, round(MIN_QUOTA_US / left))
    return _limited(asked, f"{round(period_us * left)} {period_us}", {})


def _thermal(asked: Request) -> Shot:
    shallow, deep = sorted((asked.params["low"], asked.params["high"]))
    if shallow == deep:
        raise UsageError(f"{asked.where}.high: a wave from {shallow:g} % to {deep:g} % is none; take gpu.throttle")
    period_us = max(THROTTLE_PERIOD_US, round(MIN_QUOTA_US / ((100 - deep) / 100)))
    middle, swing = (100 - (shallow + deep) / 2) / 100, (deep - shallow) / 200
    wave = {"swing_us": int(period_us * swing), "wave_s": asked.params["period"]}
    return _limited(asked, f"{round(period_us * middle)} {period_us}", wave)


def _limited(asked: Request, value: str, wave: dict[str, Any]) -> Shot:
    name, cgroup = _gpu(asked)
    return Shot(
        place=on_host(asked),
        request=held(asked, "cgroup", {"cgroup": cgroup, "value": value, **wave}, claims=cgroup),
        steps=(Step(do=f"echo {value} > {cgroup}/cpu.max", undo=f"echo max 100000 > {cgroup}/cpu.max"),),
        must_move=(Witness(any_of=(f"{name}.nr_throttled",)),),
        must_not_move=_other_gpus(asked, "nr_throttled"),
        restored=((f"{name}.quota_us", -1),),
        shows={"cgroup": cgroup},
    )


def _noisy_neighbour(asked: Request) -> Shot:
    name, cgroup = _gpu(asked)
    count = asked.params["neighbours"]
    waited_us = round(asked.for_s * _ROBBED * 1e6)
    return Shot(
        place=on_host(asked),
        request=held(asked, "hog", {"count": count, "share": 1.0, "cgroup": cgroup}, claims=f"{asked.target.node}/hog"),
        steps=(
            Step(do=f"sh -c 'while :; do :; done' &   # {count} times, into {cgroup}/cgroup.procs", undo="kill %1"),
        ),
        must_move=(Witness(any_of=(f"{name}.wait_us",), at_least=waited_us),),
        must_not_move=_other_gpus(asked, "nr_throttled"),
        shows={"cgroup": cgroup},
        while_on=((f"{asked.target.node}/hogs.running", count),),
        restored=((f"{asked.target.node}/hogs.running", 0),),
    )


def _lost(asked: Request) -> Shot:
    name, cgroup = _gpu(asked)
    unit = cgroup.rpartition("/")[2]
    return Shot(
        place=on_host(asked),
        request=held(asked, "service", {"unit": unit, "cgroup": cgroup}, claims=cgroup),
        steps=(Step(do=f"systemctl kill -s KILL {unit}", undo=f"systemctl start {unit}"),),
        must_move=(),
        must_not_move=_other_gpus(asked, "nr_throttled"),
        restored=((f"{name}.quota_us", -1),),
        shows={"cgroup": cgroup},
        while_on=((f"{name}.quota_us", None),),
    )


def _xid(asked: Request) -> Shot:
    name, _ = _gpu(asked)
    gpu = name.partition("/")[2]
    edges = trains(asked)
    return Shot(
        place=on_host(asked),
        request=held(asked, "xid", {"gpu": gpu, "xid": asked.params["xid"]}, claims=f"{name}/xid", edges=edges),
        steps=(
            Step(
                do=f"echo '<3>NVRM: Xid (PCI:{gpu}): {asked.params['xid']}, synthetic' > /dev/kmsg",
                undo="# (nothing: it has been said)",
            ),
        ),
        must_move=(Witness(any_of=(f"{name}.xids",), at_least=sum(on for _, on in edges)),),
        must_not_move=_other_gpus(asked, "xids"),
        shows={"gpu": gpu},
        # An event has no end: only how many there were can be told.
        complete_after=sum(on for _, on in edges),
    )


def _gpu(asked: Request) -> tuple[str, str]:
    target = asked.target
    if target.gpu is None:
        raise UsageError(f"{asked.where}.target: {target.text} is not a GPU")
    return f"{target.node}/{target.gpu.name}", f"{CGROUP_ROOT}/faultbed-{target.gpu.name}.service"


def _other_gpus(asked: Request, counter: str) -> tuple[str, ...]:
    target = asked.target
    return tuple(
        f"{host.name}/{gpu.name}.{counter}"
        for host in asked.topology.hosts
        for gpu in host.gpus
        if target.gpu is None or (host.name, gpu.name) != (target.node, target.gpu.name)
    )


BY_KIND: Mapping[str, Callable[[Request], Shot]] = {
    "gpu.throttle": _throttle,
    "gpu.thermal": _thermal,
    "gpu.noisy-neighbour": _noisy_neighbour,
    "gpu.lost": _lost,
    "gpu.xid": _xid,
}
