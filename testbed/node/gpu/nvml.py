"""NVIDIA GPUs by NVML, the driver's own library: identity, clocks and their limits, compute processes.

It uses nvidia-ml-py, a single file that travels with this code. NVML stays compatible from driver to driver, while the
output of nvidia-smi may change (nvidia-smi(1)). A value that a GPU or its driver does not have is None, or left out,
never zero. On an H100 the readings agree with nvidia-smi (tests/data/gpu-day).

NVML is closed after each reading. The driver waits inside the kernel for every user of a GPU before it removes the GPU
(open-gpu-kernel-modules, nv_pci_remove_helper), so that an open handle would hang a `gpu.lost`.

Sources: nvml.h of driver 575, "NVML API Reference Guide".
"""

from __future__ import annotations

import contextlib
import os
import time

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from types import ModuleType
    from typing import Any

__all__ = [
    "TOP_SHARE",
    "NoNvml",
    "clocks_set",
    "compute_mode",
    "computing",
    "counts",
    "look",
    "power_samples",
    "settings",
]

_DRIVER = "/proc/driver/nvidia/version"
"""Exists while the driver's kernel module is loaded; checking it first costs nothing on a host without a GPU."""
_APPLICATIONS, _POWER = 0x2, 0x4  # nvmlClocksEventReasonApplicationsClocksSetting, nvmlClocksEventReasonSwPowerCap
_READINGS, _READING_EVERY_S = 3, 0.1
TOP_SHARE = 0.95
"""A clock below this share of the maximum may be limited."""
_HELD_NS = {"power_capped_us": (74,), "thermal_slowdown_us": (269, 270), "power_brake_us": (271,)}
"""NVML_FI_DEV_CLOCKS_EVENT_REASON_{SW_POWER_CAP, SW_THERM_SLOWDOWN, HW_THERM_SLOWDOWN, HW_POWER_BRAKE_SLOWDOWN}: how
long each has limited the clocks, in ns since the driver was loaded."""
_AVERAGE_MW, _INSTANT_MW = 185, 186
"""NVML_FI_DEV_POWER_{AVERAGE, INSTANT} in mW: over a second, and the newest measurement (nvml.h)."""
_SM, _CORRECTED, _UNCORRECTED = 1, 0, 1  # NVML_CLOCK_SM, NVML_MEMORY_ERROR_TYPE_*
_VOLATILE, _AGGREGATE = 0, 1  # NVML_VOLATILE_ECC: since the driver was loaded; NVML_AGGREGATE_ECC: since it was made
_CORE, _SHUTDOWN, _SLOWDOWN = 0, 0, 1  # NVML_TEMPERATURE_GPU, NVML_TEMPERATURE_THRESHOLD_*
_MARGINS = {_SHUTDOWN: 193, _SLOWDOWN: 194}
"""NVML_FI_DEV_TEMPERATURE_*_TLIMIT: thresholds of Hopper and later, relative to the maximum operating temperature."""
_MODES = ("Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process")  # nvmlComputeMode_t
_UNSIGNED_INT, _UNSIGNED_LONG, _UNSIGNED_LONG_LONG, _SIGNED_INT = 1, 2, 3, 5  # nvmlValueType_t


class NoNvml(Exception):  # named for a state, like faultbed.testbed.errors
    """NVML gives no answer: there is no driver, no library or no such GPU, or the driver does not answer."""


def clocks_set(reasons: int, sm_mhz: int | None, sm_max_mhz: int | None) -> bool:
    """Return whether a GPU's clocks are set or locked, from bits of nvmlClocksEventReasons and the clocks in MHz.

    Application clocks have their own bit. Locked clocks (nvmlDeviceSetGpuLockedClocks) have none, and no call returns
    them. Their sign is a low clock, even on an idle GPU, for which no bit gives a reason, not even idleness (observed
    in JuliaGPU/CUDA.jl, pull request 2194).
    """
    if reasons or sm_mhz is None or sm_max_mhz is None:
        return bool(reasons & _APPLICATIONS)
    return sm_mhz < TOP_SHARE * sm_max_mhz


def look() -> dict[str, Any]:
    """Return the state of a host's GPUs: {"driver": TEXT or None, "why": TEXT or None, "gpus": [...]}.

    Each GPU has `index`, `bus_id` (domain of eight digits, lower case), `name`, `vbios`, `persistence`, `ecc` (on or
    off), `ecc_uncorrected` (since the driver was loaded), `remap_pending`, `remap_failed`, `reasons` (bits of
    nvmlClocksEventReasons), `sm_mhz`, `sm_max_mhz`, `power_limit_w`, and `pcie`, `pcie_max`: [generation, lanes];
    `ecc_corrected`, `remapped_rows` (because of uncorrected errors), `temp_c` and its thresholds `slowdown_c` and
    `shutdown_c`. A GPU that does not answer has only `index` and `why`.
    """
    try:
        with _session() as nvml:
            driver = _value(nvml, nvml.nvmlSystemGetDriverVersion)
            return {"driver": driver, "why": None, "gpus": [_facts(nvml, *numbered) for numbered in _handles(nvml)]}
    except NoNvml as error:
        return {"driver": None, "why": str(error), "gpus": []}


def counts(is_ours: Callable[[str], bool] | None) -> Iterator[tuple[str, int]]:
    """Yield states and counters of each GPU, such as `gpu0.clocks_set`; nothing on a machine without a driver.

    With `is_ours`, which recognises a fault's processes by their ids, also `neighbours`: how many of them compute
    there.
    """
    with contextlib.suppress(NoNvml), _session() as nvml:
        for index, gpu, why in _handles(nvml):
            if why is None:
                yield from ((f"gpu{index}.{name}", value) for name, value in _counts(nvml, gpu))
                if is_ours is not None and (pids := _value(nvml, _pids, nvml, gpu)) is not None:
                    yield f"gpu{index}.neighbours", sum(is_ours(str(pid)) for pid in pids)


def settings() -> list[dict[str, Any]]:
    """Return the settings of each GPU that may be changed: `power_w`, `clocks`, `persistence` and `mode`.

    `bus_id` identifies the GPU; `answers` is `yes`, or why it does not answer.

    A clock that is rising looks locked for a moment: it counts as set only if several readings agree.

    Raises:
        NoNvml: a driver is loaded, and its library does not answer.
    """
    gpus: list[dict[str, Any]] = []
    if not os.path.exists(_DRIVER):
        return gpus
    with _session() as nvml:
        for index, gpu, why in _handles(nvml):
            facts = _facts(nvml, index, gpu, why)
            mode = None if why else _value(nvml, nvml.nvmlDeviceGetComputeMode, gpu)
            gpus.append(
                {
                    "bus_id": facts.get("bus_id") or f"number {index}",
                    "answers": why or "yes",
                    "power_w": facts.get("power_limit_w"),
                    "clocks": "set" if why is None and _are_set(nvml, gpu) else "not set",
                    "persistence": facts.get("persistence"),
                    "mode": _MODES[mode] if mode is not None and mode < len(_MODES) else mode,
                }
            )
    return gpus


def _are_set(nvml: ModuleType, gpu: Any) -> bool:
    for reading in range(_READINGS):
        if reading:
            time.sleep(_READING_EVERY_S)
        reasons = _value(nvml, _reasons, nvml, gpu)
        clock, top = (
            _value(nvml, call, gpu, _SM) for call in (nvml.nvmlDeviceGetClockInfo, nvml.nvmlDeviceGetMaxClockInfo)
        )
        if reasons is None or not clocks_set(reasons, clock, top):
            return False
    return True


def compute_mode(pcie: str) -> str:
    """Return the compute mode of the GPU at a PCIe address: `Default` (shared), `Exclusive_Process`, `Prohibited`.

    Raises:
        NoNvml: it cannot be read.
    """
    with _session() as nvml:
        mode = _required(nvml, nvml.nvmlDeviceGetComputeMode, _at(nvml, pcie))
        return _MODES[mode] if mode < len(_MODES) else f"number {mode}"


def computing(pcie: str) -> set[int]:
    """Return the ids of all processes with a compute context on the GPU at a PCIe address.

    Raises:
        NoNvml: it cannot be read.
    """
    with _session() as nvml:
        return set(_required(nvml, _pids, nvml, _at(nvml, pcie)))


def power_samples(pcie: str, every_s: float) -> Generator[dict[str, int | None]]:
    """Yield the power of the GPU at a PCIe address every `every_s`, until the caller closes the generator.

    Keys: `t_ns` (CLOCK_MONOTONIC), `instant_mw`, `average_mw` (over a second), `energy_mj` (since the driver was
    loaded), `sm_mhz`, `reasons` (bits of nvmlClocksEventReasons) and `temp_c`. NVML stays open meanwhile, so the driver
    cannot remove the GPU (`gpu.lost`).

    Raises:
        NoNvml: there is no such GPU, or NVML gives no answer.
    """
    with _session() as nvml:
        gpu = _at(nvml, pcie)
        due_s = time.monotonic()
        while True:
            yield _power(nvml, gpu)
            due_s = max(due_s + every_s, time.monotonic())
            time.sleep(max(0.0, due_s - time.monotonic()))


def _power(nvml: ModuleType, gpu: Any) -> dict[str, int | None]:
    t_ns = time.monotonic_ns()
    values = _value(nvml, nvml.nvmlDeviceGetFieldValues, gpu, [_INSTANT_MW, _AVERAGE_MW]) or (None, None)
    instant_mw, average_mw = (_number(value) for value in values)
    return {
        "t_ns": t_ns,
        "instant_mw": instant_mw,
        "average_mw": average_mw,
        "energy_mj": _value(nvml, nvml.nvmlDeviceGetTotalEnergyConsumption, gpu),
        "sm_mhz": _value(nvml, nvml.nvmlDeviceGetClockInfo, gpu, _SM),
        "reasons": _value(nvml, _reasons, nvml, gpu),
        "temp_c": _value(nvml, nvml.nvmlDeviceGetTemperature, gpu, _CORE),
    }


@contextlib.contextmanager
def _session() -> Iterator[ModuleType]:
    if not os.path.exists(_DRIVER):
        raise NoNvml(f"no NVIDIA driver is loaded ({_DRIVER} does not exist)")
    import pynvml  # noqa: PLC0415 - 8,000 lines, only for hosts with a GPU

    _required(pynvml, pynvml.nvmlInit)
    try:
        yield pynvml
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _required(nvml: ModuleType, call: Callable[..., Any], *args: Any) -> Any:
    """Return a call's result, or raise NoNvml."""
    try:
        return call(*args)
    except nvml.NVMLError as error:
        raise NoNvml(f"NVML: {error}") from None


def _value(nvml: ModuleType, call: Callable[..., Any], *args: Any) -> Any:
    """Return a call's result; None if this GPU or driver does not have it, or without permission."""
    try:
        return call(*args)
    except nvml.NVMLError:
        return None


def _handles(nvml: ModuleType) -> Iterator[tuple[int, Any, str | None]]:
    """Yield index, handle and, for a GPU that does not answer, the reason."""
    for index in range(_required(nvml, nvml.nvmlDeviceGetCount)):
        try:
            yield index, nvml.nvmlDeviceGetHandleByIndex(index), None
        except nvml.NVMLError as error:
            yield index, None, f"NVML: {error}"


def _at(nvml: ModuleType, pcie: str) -> Any:
    return _required(nvml, nvml.nvmlDeviceGetHandleByPciBusId, pcie)


def _facts(nvml: ModuleType, index: int, gpu: Any, why: str | None) -> dict[str, Any]:
    if why is not None:
        return {"index": index, "why": why}
    bus = _value(nvml, nvml.nvmlDeviceGetPciInfo, gpu)
    ecc = _value(nvml, nvml.nvmlDeviceGetEccMode, gpu)
    persistence = _value(nvml, nvml.nvmlDeviceGetPersistenceMode, gpu)
    return {
        "index": index,
        "bus_id": _text(bus.busId).lower() if bus is not None else None,
        "name": _value(nvml, nvml.nvmlDeviceGetName, gpu),
        "vbios": _value(nvml, nvml.nvmlDeviceGetVbiosVersion, gpu),
        "persistence": None if persistence is None else bool(persistence),
        "ecc": None if ecc is None else bool(ecc[0]),
        **_health(nvml, gpu),
        "reasons": _value(nvml, _reasons, nvml, gpu),
        "sm_mhz": _value(nvml, nvml.nvmlDeviceGetClockInfo, gpu, _SM),
        "sm_max_mhz": _value(nvml, nvml.nvmlDeviceGetMaxClockInfo, gpu, _SM),
        "power_limit_w": _watts(_value(nvml, nvml.nvmlDeviceGetPowerManagementLimit, gpu)),
        "pcie": [
            _value(nvml, nvml.nvmlDeviceGetCurrPcieLinkGeneration, gpu),
            _value(nvml, nvml.nvmlDeviceGetCurrPcieLinkWidth, gpu),
        ],
        "pcie_max": [
            _value(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, gpu),
            _value(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, gpu),
        ],
    }


def _counts(nvml: ModuleType, gpu: Any) -> Iterator[tuple[str, int]]:
    sm_mhz = _value(nvml, nvml.nvmlDeviceGetClockInfo, gpu, _SM)
    if (reasons := _value(nvml, _reasons, nvml, gpu)) is not None:
        top_mhz = _value(nvml, nvml.nvmlDeviceGetMaxClockInfo, gpu, _SM)
        yield "clocks_set", int(clocks_set(reasons, sm_mhz, top_mhz))
        yield "power_capped", int(bool(reasons & _POWER))
    if sm_mhz is not None:
        yield "sm_mhz", sm_mhz
    health = _health(nvml, gpu)
    for kind, name in ((_CORRECTED, "ecc_corrected_total"), (_UNCORRECTED, "ecc_uncorrected_total")):
        health[name] = _value(nvml, nvml.nvmlDeviceGetTotalEccErrors, gpu, kind, _AGGREGATE)
    yield from ((name, int(value)) for name, value in health.items() if value is not None)
    if (replays := _value(nvml, nvml.nvmlDeviceGetPcieReplayCounter, gpu)) is not None:
        yield "pcie_replays", replays
    field_ids = [field for fields in _HELD_NS.values() for field in fields]
    values = {
        field_value.fieldId: field_value
        for field_value in _value(nvml, nvml.nvmlDeviceGetFieldValues, gpu, field_ids) or ()
    }
    for name, fields in _HELD_NS.items():
        held_ns = [ns for field in fields if (ns := _number(values.get(field))) is not None]
        if held_ns:
            yield name, sum(held_ns) // 1000


def _health(nvml: ModuleType, gpu: Any) -> dict[str, int | None]:
    """Return the readings that have thresholds; None: the GPU does not report it."""
    remapped = _value(nvml, nvml.nvmlDeviceGetRemappedRows, gpu)
    temp_c = _value(nvml, nvml.nvmlDeviceGetTemperature, gpu, _CORE)
    return {
        "ecc_corrected": _value(nvml, nvml.nvmlDeviceGetTotalEccErrors, gpu, _CORRECTED, _VOLATILE),
        "ecc_uncorrected": _value(nvml, nvml.nvmlDeviceGetTotalEccErrors, gpu, _UNCORRECTED, _VOLATILE),
        "remapped_rows": None if remapped is None else remapped[1],
        "remap_pending": None if remapped is None else bool(remapped[2]),
        "remap_failed": None if remapped is None else bool(remapped[3]),
        "temp_c": temp_c,
        "slowdown_c": _threshold_c(nvml, gpu, _SLOWDOWN, temp_c),
        "shutdown_c": _threshold_c(nvml, gpu, _SHUTDOWN, temp_c),
    }


def _threshold_c(nvml: ModuleType, gpu: Any, threshold: int, temp_c: int | None) -> int | None:
    """Return a temperature threshold. If the GPU reports only margins, the threshold is computed from them.

    `nvidia-smi -q` of an H100 shows 33 °C, 54 °C below the maximum, and a slowdown at -2: 33 + 54 + 2 = 89 °C.
    """
    if (value := _value(nvml, nvml.nvmlDeviceGetTemperatureThreshold, gpu, threshold)) is not None:
        return int(value)
    left_c = _value(nvml, nvml.nvmlDeviceGetMarginTemperature, gpu)
    fields = _value(nvml, nvml.nvmlDeviceGetFieldValues, gpu, [_MARGINS[threshold]]) or ()
    below_c = next((_number(field) for field in fields), None)
    return None if None in (temp_c, left_c, below_c) else temp_c + left_c - below_c


def _number(field: Any) -> int | None:
    """Return an nvmlFieldValue_t as an integer; None: it is not one, or the GPU does not have the field."""
    if field is None or field.nvmlReturn:
        return None
    names = {_UNSIGNED_INT: "uiVal", _UNSIGNED_LONG: "ulVal", _UNSIGNED_LONG_LONG: "ullVal", _SIGNED_INT: "siVal"}
    name = names.get(field.valueType)
    return int(getattr(field.value, name)) if name else None


def _reasons(nvml: ModuleType, gpu: Any) -> int:
    """Return the clocks' event reasons; drivers before 535 have only the older name of the call."""
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu))
    except nvml.NVMLError_FunctionNotFound:
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))


def _pids(nvml: ModuleType, gpu: Any) -> list[int]:
    return [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu)]


def _watts(milliwatts: int | None) -> int | None:
    return None if milliwatts is None else round(milliwatts / 1000)


def _text(raw: bytes | str) -> str:
    return raw.decode() if isinstance(raw, bytes) else raw
