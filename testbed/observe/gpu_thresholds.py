"""Which number of which GPU reading or event means "watch it", "drain it" or "return it" (RMA). Pure.

One table for preflight and `faultbed offenders`. A reading or an event that no row names decides nothing.

    python -m faultbed.testbed.observe.gpu_thresholds > docs/gpu-thresholds.md

Sources, by the names that NVIDIA gives them: "NVIDIA GPU Memory Error Management" (RMA Policy; Response to
Uncorrectable Contained ECC Errors; Error Recovery and Response Flags), "XID Errors", "Analyzing Xid
Errors with the Xid Catalog", "NVML API Reference Guide". Meta's
health checks (facebookresearch/gcm, `row_remap`) call a pending remap critical, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "ACTIONS",
    "READINGS",
    "XIDS",
    "Action",
    "Breach",
    "breach_in",
    "breaches",
    "markdown",
    "severest",
    "severest_first",
    "xid_breaches",
]

Action = Literal["watch", "drain", "RMA"]
ACTIONS: tuple[Action, ...] = ("watch", "drain", "RMA")
"""All actions, the mildest first. `watch` is listed and drains nothing."""

_RESET = "reset the GPU (`nvidia-smi --gpu-reset`) before the next job"
_MEMORY, _XID, _NVML = "GPU Memory Error Management", "XID Errors", "NVML API Reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """One row: from `at_least` on, a reading calls for an action.

    `at_least` is a number, or the name of the reading that holds it: each GPU has its own temperature thresholds.
    """

    reading: str
    at_least: int | str
    action: Action
    meaning: str
    do: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """The action that an XID event calls for."""

    action: Action
    meaning: str
    do: str
    source: str = _XID


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """A threshold that a GPU has reached. `text` names the counter, its value, the threshold and the meaning."""

    action: Action
    text: str
    do: str


READINGS: tuple[Threshold, ...] = (
    Threshold(
        reading="ecc_corrected",
        at_least=1,
        action="watch",
        meaning="corrected memory errors since the last reset",
        do="nothing: the driver reports XID 92 once their rate is too high",
        source=_XID,
    ),
    Threshold(
        reading="ecc_uncorrected",
        at_least=1,
        action="drain",
        meaning="uncorrected memory errors since the last reset",
        do=f"{_RESET}, and run `dcgmi diag -r 3`",
        source=_MEMORY,
    ),
    Threshold(
        reading="remapped_rows",
        at_least=1,
        action="watch",
        meaning="rows remapped because of uncorrected errors",
        do="nothing: a remapped row works",
        source=_MEMORY,
    ),
    Threshold(
        reading="remapped_rows",
        at_least=512,
        action="RMA",
        meaning="rows remapped because of uncorrected errors: as many as a GPU can remap",
        do="run NVIDIA's field diagnostic, and return the GPU",
        source=_MEMORY,
    ),
    Threshold(
        reading="remap_pending",
        at_least=1,
        action="drain",
        meaning="a row waits to be remapped",
        do=f"{_RESET}: it remaps the row",
        source=_MEMORY,
    ),
    Threshold(
        reading="remap_failed",
        at_least=1,
        action="RMA",
        meaning="a row could not be remapped",
        do="run NVIDIA's field diagnostic, and return the GPU",
        source=_MEMORY,
    ),
    Threshold(
        reading="temp_c",
        at_least="slowdown_c",
        action="drain",
        meaning="°C: so hot that it lowers its clocks by half or more",
        do="check fans, airflow and the cold plate",
        source=_NVML,
    ),
    Threshold(
        reading="temp_c",
        at_least="shutdown_c",
        action="drain",
        meaning="°C: so hot that it shuts itself down",
        do="check fans, airflow and the cold plate, then power-cycle the host",
        source=_NVML,
    ),
)

_CATALOG = "Xid Catalog"
_NVLINK = f"{_RESET}; if it returns, check the other end of the NVLink"
XIDS: Mapping[int, Event] = {
    46: Event(action="drain", meaning="GPU stopped processing", do=_RESET, source=_CATALOG),
    48: Event(action="drain", meaning="uncorrected memory error", do=_RESET, source=_MEMORY),
    62: Event(action="drain", meaning="internal microcontroller halt", do=_RESET, source=_CATALOG),
    63: Event(action="drain", meaning="a row waits to be remapped", do=f"{_RESET}: it remaps the row", source=_MEMORY),
    64: Event(
        action="RMA",
        meaning="a row could not be remapped",
        do="run NVIDIA's field diagnostic, and return the GPU",
        source=_MEMORY,
    ),
    74: Event(action="drain", meaning="NVLink error", do=_NVLINK),
    79: Event(action="drain", meaning="fallen off the bus", do="reboot the host; if it returns, reseat the GPU"),
    92: Event(
        action="watch", meaning="high rate of corrected memory errors", do="run `dcgmi diag -r 3` when the host is idle"
    ),
    94: Event(action="drain", meaning="contained uncorrected memory error", do=_RESET, source=_MEMORY),
    95: Event(action="drain", meaning="uncontained uncorrected memory error", do=_RESET, source=_MEMORY),
    110: Event(action="drain", meaning="security fault", do=_RESET, source=_CATALOG),
    119: Event(action="drain", meaning="the GPU's system processor (GSP) did not answer", do=_RESET, source=_CATALOG),
    120: Event(action="drain", meaning="error of the GPU's system processor (GSP)", do=_RESET, source=_CATALOG),
    140: Event(action="drain", meaning="uncorrected memory error that was not recovered", do=_RESET, source=_CATALOG),
    143: Event(
        action="drain",
        meaning="the GPU could not be initialised",
        do="power-cycle the host; if it returns, run NVIDIA's field diagnostic",
        source=_CATALOG,
    ),
    **{
        xid: Event(action="drain", meaning=f"fatal NVLink error ({unit})", do=_NVLINK, source=_CATALOG)
        for xid, unit in ((144, "SAW"), (145, "RLW"), (146, "TLW"), (147, "TREX"), (148, "NVLPW"), (149, "NETIR"))
    },
    150: Event(action="drain", meaning="fatal NVLink error (MSE)", do=_NVLINK, source=_CATALOG),
    154: Event(
        action="drain",
        meaning="the driver asks for a recovery: a reset, a reboot of the host, or no more peer-to-peer traffic",
        do="do what the event's text says, before the next job",
        source=_CATALOG,
    ),
    155: Event(action="drain", meaning="NVLink error that the driver reports", do=_NVLINK, source=_CATALOG),
    157: Event(
        action="RMA",
        meaning="a resource could not be retired",
        do="run NVIDIA's field diagnostic, and return the GPU",
        source=_CATALOG,
    ),
    158: Event(action="drain", meaning="fatal timeout of the GPU", do=_RESET, source=_CATALOG),
    167: Event(action="drain", meaning="fatal PCIe timeout", do="reboot the host", source=_CATALOG),
    171: Event(action="drain", meaning="uncorrected DRAM error, beside XID 48", do=_RESET, source=_CATALOG),
    172: Event(action="drain", meaning="uncorrected SRAM error, beside XID 48", do=_RESET, source=_CATALOG),
}
"""Events of NVIDIA's driver by number. Others, such as those of programs (13, 31, 43), only count as strikes."""


def severest(actions: Iterable[Action]) -> Action:
    """Return the severest of some actions; `watch` if there is none."""
    return max(actions, key=ACTIONS.index, default="watch")


def breaches(readings: Mapping[str, int | None]) -> tuple[Breach, ...]:
    """Return what a GPU's readings call for, the severest first: at most one breach of each reading.

    A reading that the GPU does not have, or whose threshold it does not report, calls for nothing.
    """
    by_reading: dict[str, Breach] = {}
    for row in READINGS:
        value = readings.get(row.reading)
        limit = readings.get(row.at_least) if isinstance(row.at_least, str) else row.at_least
        if value is None or limit is None or value < limit:
            continue
        text = f"{row.action}: {row.reading} is {value} (from {limit} on): {row.meaning}"
        by_reading[row.reading] = Breach(action=row.action, text=text, do=row.do)  # later rows are severer
    return severest_first(by_reading.values())


def breach_in(text: str, *, do: str) -> Breach | None:
    """Return the breach whose `text` a preflight has printed; None: it is the text of something else."""
    action = next((known for known in ACTIONS if text.startswith(f"{known}: ")), None)
    return None if action is None else Breach(action=action, text=text, do=do)


def xid_breaches(events: Mapping[int, int]) -> tuple[Breach, ...]:
    """Return what XID events call for, the severest first; `events` are their counts by number."""
    return severest_first(
        Breach(action=row.action, text=f"{row.action}: XID {xid}, {count} times: {row.meaning}", do=row.do)
        for xid, count in sorted(events.items())
        if count and (row := XIDS.get(xid)) is not None
    )


def severest_first(reached: Iterable[Breach]) -> tuple[Breach, ...]:
    """Return breaches in the order in which they need action."""
    return tuple(sorted(reached, key=lambda breach: -ACTIONS.index(breach.action)))


def markdown() -> str:
    """Return the page with both tables."""
    readings = "\n".join(
        f"| `{row.reading}` | {f'`{row.at_least}`' if isinstance(row.at_least, str) else row.at_least} | "
        f"{row.action} | {row.meaning} | {row.do} | {row.source} |"
        for row in READINGS
    )
    events = "\n".join(
        f"| {xid} | {row.action} | {row.meaning} | {row.do} | {row.source} |" for xid, row in XIDS.items()
    )
    return f"""\
# When to watch, drain or return a GPU

Preflight (check `gpu-health`) and `offenders` decide by these tables. `watch` is listed and drains
nothing. `drain` stands until a newer run or preflight reads the GPU without the breach, which takes a reset. Readings
come from NVML; those of a soft lab's GPUs are synthetic (`gpu.ecc`, `gpu.row-remap`, `gpu.overheat`). `slowdown_c` and
`shutdown_c` are the GPU's own; a soft GPU has those of an H100, 89 and 95 °C.

## Readings

| reading | from | action | it means | do | source (NVIDIA) |
|---|---|---|---|---|---|
{readings}

## XID events

| XID | action | it means | do | source (NVIDIA) |
|---|---|---|---|---|
{events}

Independently of these tables, `offenders` counts strikes: any confident finding against a GPU, any wrong result of a
preflight. From `--drain` strikes on (1.5) it is drained, from `--rma` on (3, on three days) returned; a strike counts
half after `--half-life` (7 days).
"""


if __name__ == "__main__":
    print(markdown(), end="")
