"""The preflight check of GPU memory and heat: NVML's readings against `testbed/observe/gpu_thresholds.py`. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.observe.gpu_thresholds import breaches
from faultbed.testbed.preflight.checks import Check, State
from faultbed.testbed.preflight.rack_formats import Gpu, gpus

__all__ = ["CHECK", "readings_of"]


def readings_of(gpu: Gpu) -> dict[str, int | None]:
    """Return the readings that have thresholds, by the names that counters have."""
    return {
        "ecc_corrected": gpu.ecc_corrected,
        "ecc_uncorrected": gpu.ecc_uncorrected,
        "remapped_rows": gpu.remapped_rows,
        "remap_pending": None if gpu.remap_pending is None else int(gpu.remap_pending),
        "remap_failed": None if gpu.remap_failed is None else int(gpu.remap_failed),
        "temp_c": gpu.temp_c,
        "slowdown_c": gpu.slowdown_c,
        "shutdown_c": gpu.shutdown_c,
    }


def _problems(inventory: Inventory, state: State) -> Iterator[tuple[str, str, str]]:
    for where, gpu in _gpus(inventory, state):
        for breach in breaches(readings_of(gpu)):
            if breach.action != "watch":
                yield where, breach.text, breach.do


def _undetermined(inventory: Inventory, state: State) -> Iterator[tuple[str, str]]:
    for host in inventory.topology.hosts:
        if not host.gpus:
            continue
        answer = gpus(state[host.name].raw.get("gpu", ""))
        if len(answer.gpus) < len(host.gpus):
            yield (
                host.name,
                f"{len(answer.gpus)} of {len(host.gpus)} GPUs answer{f': {answer.why}' if answer.why else ''}",
            )
    for where, gpu in _gpus(inventory, state):
        if lacking := [name for name, value in readings_of(gpu).items() if value is None]:
            yield where, f"NVML does not report {', '.join(lacking)}"


def _gpus(inventory: Inventory, state: State) -> Iterator[tuple[str, Gpu]]:
    """Yield the GPUs that answer, by place."""
    for host in inventory.topology.hosts:
        for gpu in gpus(state[host.name].raw.get("gpu", "")).gpus:
            if gpu.why is None:
                yield f"{host.name}:{gpu.place}", gpu


CHECK = Check(
    name="gpu-health",
    method="ECC errors, remapped rows and temperature of every GPU, by NVML (of a soft lab's: synthetic)",
    expected="below the thresholds of docs/gpu-thresholds.md that drain or return a GPU",
    do="drain the host; the right column says what repairs each GPU (synthetic health of a soft lab: `faultbed heal`)",
    problems=_problems,
    undetermined=_undetermined,
)
