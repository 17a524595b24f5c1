"""Synthetic health registers of soft GPUs, with the names and meanings that NVML gives to those of real GPUs.

A fault writes a file for each part of a GPU (`gpu0.memory.now`). Removing the file corresponds to a reset of the GPU.
Values that a real GPU stores permanently in its InfoROM (NVML's aggregate counters, remapped rows) are in a second file
(`gpu0.memory.ever`). No revert changes it: counters never go back.

Meanings: "NVML API Reference Guide" (nvmlDeviceGetTotalEccErrors, nvmlDeviceGetRemappedRows); "NVIDIA GPU Memory Error
Management" (containment, row remapping).
"""

from __future__ import annotations

import contextlib
import json
import os
import time

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

__all__ = ["FOLDER", "IDLE_C", "SHUTDOWN_C", "SLOWDOWN_C", "FaultyMemory", "Health", "facts", "known", "look"]

FOLDER = "/run/faultbed/gpu-health"
IDLE_C = 45
SLOWDOWN_C, SHUTDOWN_C = 89, 95
"""Thresholds of an H100 SXM: its maximum operating temperature is 87 °C, and `nvidia-smi -q` reports the thresholds as
T.Limit -2 and -8 relative to that."""
_LIMITS = {"slowdown_c": SLOWDOWN_C, "shutdown_c": SHUTDOWN_C}
_NOW = {"ecc_corrected": 0, "ecc_uncorrected": 0, "remap_pending": 0, "remap_failed": 0, "temp_c": IDLE_C}
_EVER = {"ecc_corrected_total": 0, "ecc_uncorrected_total": 0, "remapped_rows": 0, "thermal_slowdown_us": 0}


class Health:
    """The registers of one soft GPU. Each fault owns one `part`: memory, rows or heat."""

    def __init__(self, gpu: str) -> None:
        self._gpu = gpu

    def file(self, part: str) -> str:
        """Return the file whose removal resets a part."""
        return f"{FOLDER}/{self._gpu}.{part}.now"

    def state(self, part: str) -> dict[str, Any] | None:
        """Return what a fault has set in a part; None: nothing."""
        return _load(self.file(part))

    def set(self, part: str, **values: Any) -> None:
        """Set registers of a part until its reset."""
        _store(self.file(part), {**(self.state(part) or {}), **values})

    def reset(self, part: str) -> None:
        """Forget what was set in a part."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.file(part))

    def count(self, part: str, **increments: int) -> None:
        """Add to counters that survive a reset."""
        path = f"{FOLDER}/{self._gpu}.{part}.ever"
        before = _load(path) or {}
        _store(path, {**before, **{name: before.get(name, 0) + more for name, more in increments.items()}})

    def counts(self) -> dict[str, int]:
        """Return every register; temperatures in °C."""
        values = {**_NOW, **_EVER, **_LIMITS}
        slowed_since_ns = None
        for entry in known():
            if entry.startswith(f"{self._gpu}."):
                state = _load(f"{FOLDER}/{entry}") or {}
                slowed_since_ns = state.get("slowed_since_ns", slowed_since_ns)
                values.update((name, value) for name, value in state.items() if name in values)
        if slowed_since_ns is not None:
            values["thermal_slowdown_us"] += (time.monotonic_ns() - slowed_since_ns) // 1000
        return values


def look(gpus: Iterable[str]) -> dict[str, Any]:
    """Return the health of soft GPUs as `look` of `testbed/node/gpu/nvml.py`, without the keys they lack."""
    entries = []
    for at, gpu in enumerate(sorted(gpus)):
        values: dict[str, Any] = Health(gpu).counts()
        flags = {name: bool(values[name]) for name in ("remap_pending", "remap_failed")}
        entries.append({"index": _index(gpu, at), **values, **flags})
    return {"driver": None, "why": None, "gpus": entries}


def _index(gpu: str, otherwise: int) -> int:
    digits = gpu.removeprefix("gpu")
    return int(digits) if digits.isdigit() else otherwise


class FaultyMemory:
    """Decide which requests of programs fail because of an uncorrected memory error of their soft GPU.

    A contained error fails one request, as it would end one program; later requests succeed. After an uncontained
    error every request fails until the GPU's reset ("NVIDIA GPU Memory Error Management").
    """

    def __init__(self, health: Health) -> None:
        self._health = health
        self._met = self._errors()[0]

    def _errors(self) -> tuple[int, bool]:
        state = self._health.state("memory") or {}
        return int(state.get("ecc_uncorrected", 0)), state.get("error") == "uncontained"

    def failure(self) -> str | None:
        """Return the error that a request gets now, or None; an error that was contained is returned once."""
        errors, is_uncontained = self._errors()
        is_new, self._met = errors > self._met, errors
        if errors and is_uncontained:
            return "uncorrectable ECC error, uncontained (XID 95): the GPU needs a reset"
        return "uncorrectable ECC error, contained (XID 94)" if is_new else None


def known() -> list[str]:
    """Return the names of all register files; none if no fault has changed the health of this machine's GPUs."""
    try:
        return sorted(name for name in os.listdir(FOLDER) if name.endswith((".now", ".ever")))
    except FileNotFoundError:
        return []


def facts() -> list[tuple[str, str]]:
    """Return what faults have set at present, as facts of a fingerprint: ("gpu-health gpu0.heat", "temp_c 92")."""
    states = ((name, _load(f"{FOLDER}/{name}")) for name in known() if name.endswith(".now"))
    return [
        (f"gpu-health {name.removesuffix('.now')}", ", ".join(f"{key} {state[key]}" for key in sorted(state)))
        for name, state in states
        if state is not None
    ]


def _load(path: str) -> dict[str, Any] | None:
    try:
        with open(path, encoding="ascii") as file:
            values: dict[str, Any] = json.load(file)
            return values
    except FileNotFoundError:
        return None


def _store(path: str, values: dict[str, Any]) -> None:
    """Replace a file as a whole, so that no reader sees half of it."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = f"{path}.new"
    with open(temporary, "w", encoding="ascii") as file:
        json.dump(values, file)
    os.replace(temporary, path)
