"""`samples.parquet`: the payload bytes of every rank, bin by bin."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from faultbed.harness.record.evidence.workload_evidence import WorkloadEvidence

__all__ = ["SAMPLES_SCHEMA", "write"]

SAMPLES_SCHEMA = pa.schema(
    [
        pa.field("rank", pa.int32(), nullable=False, metadata={"meaning": "rank of the workload"}),
        pa.field("host", pa.string(), nullable=False, metadata={"meaning": "host of the rank"}),
        pa.field("rnic", pa.string(), nullable=False, metadata={"meaning": "RNIC of the rank"}),
        pa.field("t_ns", pa.int64(), nullable=False, metadata={"meaning": "bin start, controller monotonic ns"}),
        pa.field("since_start_ns", pa.int64(), nullable=False, metadata={"meaning": "t_ns - t0_ns of the run"}),
        pa.field("bytes", pa.int64(), nullable=False, metadata={"meaning": "payload bytes in this bin"}),
    ]
)
"""Columns of `samples.parquet`; one row per rank and bin. File metadata: `t0_ns`, `sample_ns`."""


def write(work: WorkloadEvidence, path: Path) -> None:
    """Write the samples of a workload, with the columns of `SAMPLES_SCHEMA`."""
    pq.write_table(_table(work), path)


def _table(work: WorkloadEvidence) -> pa.Table:
    ranks = {rank.rank: rank for rank in work.ranks}
    rows = [
        (series.rank, ranks[series.rank].host, ranks[series.rank].rnic, sample.t_ns, sample.bytes)
        for series in work.series
        for sample in series.samples
    ]
    columns = list(zip(*rows, strict=True)) if rows else [()] * 5
    rank, host, rnic, t_ns, size = columns
    table = pa.table(
        {
            "rank": rank,
            "host": host,
            "rnic": rnic,
            "t_ns": t_ns,
            "since_start_ns": [t - work.t0_ns for t in t_ns],
            "bytes": size,
        },
        schema=SAMPLES_SCHEMA,
    )
    return table.replace_schema_metadata(
        {"t0_ns": str(work.t0_ns), "sample_ns": str(work.sample_ns), "python": sys.version.split()[0]}
    )
