"""Compare the model with recorded results of a packet-level simulator (`tests/data/packet-level`).

Links, paths and sizes of the flows are those of the records. The model has no packets: rates are max-min fair, and each
step of a ring has a latency.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from faultbed.testbed.routing.max_min import completion_times, loads_of_paths, max_min_rates, merged

__all__ = ["Recorded", "last_flow_s", "mean_stretch", "read", "ring_job_s"]

FOLDER = Path(__file__).parent.parent / "tests" / "data" / "packet-level"
MTU, HEADER = 4096, 64
BYTES_PER_S = 50e9 * MTU / (MTU + HEADER)
"""Payload of a link of 400 Gb/s: each packet of `MTU` bytes has a header, too."""
ALPHA_S = 4 * 0.5e-6 + 3 * MTU / BYTES_PER_S
"""Four links of 0.5 us each, and three switches that store a packet before they send it."""
STEPS = 12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recorded:
    """The flows of one record: source, target, numbers of the links crossed, bytes, and completion time in s."""

    ends: tuple[tuple[int, int], ...]
    paths: np.ndarray
    size_bytes: np.ndarray
    seconds: np.ndarray
    links: int


def read(name: str) -> Recorded:
    """Return a record by the name of its file, such as `perm1`."""
    rows = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    numbers: dict[str, int] = {}
    paths = [[numbers.setdefault(link, len(numbers)) for link in (f"SRC{src}", *hops)] for src, _, _, hops, _ in rows]
    width = max(map(len, paths))
    return Recorded(
        ends=tuple((row[0], row[1]) for row in rows),
        paths=np.array([path + [-1] * (width - len(path)) for path in paths], dtype=np.int32),
        size_bytes=np.array([row[2] for row in rows], dtype=np.float64),
        seconds=np.array([row[4] for row in rows]) / 1e6,
        links=len(numbers),
    )


def last_flow_s(record: Recorded) -> float:
    """Return when the last flow of a record ends in the model."""
    capacity = np.full(record.links, BYTES_PER_S)
    return float(completion_times(loads_of_paths(record.paths), capacity, record.size_bytes).max()) + ALPHA_S


def mean_stretch(record: Recorded) -> float:
    """Return the mean ratio of recorded to modelled times of flows; PFC's head-of-line blocking makes it exceed 1."""
    capacity = np.full(record.links, BYTES_PER_S)
    ends = completion_times(loads_of_paths(record.paths), capacity, record.size_bytes) + ALPHA_S
    return float(np.mean(record.seconds / ends))


def ring_job_s(record: Recorded) -> float:
    """Return when the last of `STEPS` steps of the record's rings ends in the model; each ring is one unit."""
    following = dict(record.ends)
    ring: dict[int, int] = {}
    for first in following:
        number, at = len(set(ring.values())), first
        while at not in ring:
            ring[at] = number
            at = following[at]
    units = len(set(ring.values()))
    unit = [ring[src] for (src, _), path in zip(record.ends, record.paths, strict=True) for link in path if link >= 0]
    weight = [size for size, path in zip(record.size_bytes, record.paths, strict=True) for link in path if link >= 0]
    loads = merged(unit, record.paths[record.paths >= 0], weight, units=units)
    steps_per_s = max_min_rates(loads, np.full(record.links, BYTES_PER_S))
    return STEPS * (1 / float(steps_per_s.min()) + ALPHA_S)
