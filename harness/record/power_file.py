"""`power.parquet`: the power of a GPU by time, with the phases of its load."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from faultbed.harness.record import parquet
from faultbed.testbed.errors import RecordError

__all__ = ["POWER_SCHEMA", "read", "write"]


def _column(name: str, kind: pa.DataType, meaning: str, *, nullable: bool = True) -> pa.Field:
    return pa.field(name, kind, nullable=nullable, metadata={"meaning": meaning})


POWER_SCHEMA = pa.schema(
    [
        _column("t_ns", pa.int64(), "time of the sample, monotonic ns of the GPU's host", nullable=False),
        _column("instant_mw", pa.int64(), "the newest measurement of the GPU, mW"),
        _column("average_mw", pa.int64(), "mean over a second, mW"),
        _column("energy_mj", pa.int64(), "energy since the driver was loaded, mJ"),
        _column("sm_mhz", pa.int64(), "clock of the multiprocessors, MHz"),
        _column("reasons", pa.int64(), "why the clock is limited, bits of nvmlClocksEventReasons"),
        _column("temp_c", pa.int64(), "temperature of the GPU, °C"),
    ]
)
"""Columns of `power.parquet`; one row per sample; null: the GPU or its driver does not report it. File metadata:
`spans`, the phases of the load as JSON; `about`, text by name as JSON (GPU, driver, command)."""


def write(
    samples: Sequence[Mapping[str, Any]], spans: Iterable[Mapping[str, Any]], path: Path, *, about: Mapping[str, str]
) -> None:
    """Write samples of `faultbed.testbed.node.gpu.nvml.power_samples`."""
    metadata = {"spans": json.dumps(list(spans)), "about": json.dumps(dict(about))}
    rows = [{name: sample.get(name) for name in POWER_SCHEMA.names} for sample in samples]
    pq.write_table(pa.Table.from_pylist(rows, schema=POWER_SCHEMA.with_metadata(metadata)), path)


def read(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, str]]:
    """Return the samples, the phases and what the file says about itself.

    Raises:
        RecordError: the file cannot be read, or lacks a column or its metadata.
    """
    table = parquet.read(path, POWER_SCHEMA)
    try:
        spans, about = (json.loads((table.schema.metadata or {})[name]) for name in (b"spans", b"about"))
    except (KeyError, ValueError) as error:
        raise RecordError(f"{path}: its metadata cannot be read: {error!r}; record it again") from error
    return table.to_pylist(), spans, about
