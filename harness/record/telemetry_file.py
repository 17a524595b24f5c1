"""`telemetry.parquet` and `changes.parquet`: what the lab counted, and what changed on it, while the workload ran."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from faultbed.harness.record import parquet
from faultbed.testbed.observe.telemetry import Change, Recorded, Sample

__all__ = ["CHANGES_SCHEMA", "TELEMETRY_SCHEMA", "read", "write"]

_AT = [
    pa.field("t_ns", pa.int64(), nullable=False, metadata={"meaning": "when, controller monotonic ns"}),
    pa.field("since_start_ns", pa.int64(), nullable=False, metadata={"meaning": "t_ns - t0_ns of the run"}),
    pa.field("node", pa.string(), nullable=False, metadata={"meaning": "host or switch"}),
]
TELEMETRY_SCHEMA = pa.schema(
    [
        *_AT,
        pa.field("name", pa.string(), nullable=False, metadata={"meaning": "counter or state, device.name"}),
        pa.field("value", pa.int64(), nullable=False, metadata={"meaning": "its value, when it had moved"}),
    ]
)
"""Columns of `telemetry.parquet`, long form: a row for each value that differs from the sample before."""

CHANGES_SCHEMA = pa.schema(
    [
        *_AT,
        pa.field("subject", pa.string(), nullable=False, metadata={"meaning": "link, route or nexthop, and its name"}),
        pa.field("text", pa.string(), metadata={"meaning": "as it is now; null: gone"}),
    ]
)
"""Columns of `changes.parquet`: a row for each change that a kernel reported."""


def write(recorded: Recorded, *, t0_ns: int, telemetry: Path, changes: Path) -> None:
    """Write both files."""
    rows = [
        (sample.at_ns, sample.node, name, value) for sample in recorded.samples for name, value in sample.values.items()
    ]
    at_ns, node, name, value = zip(*rows, strict=True) if rows else ((), (), (), ())
    since = [at - t0_ns for at in at_ns]
    table = pa.table([at_ns, since, node, name, value], schema=TELEMETRY_SCHEMA)
    pq.write_table(table.replace_schema_metadata({"t0_ns": str(t0_ns)}), telemetry)
    table = pa.table(
        [
            [change.at_ns for change in recorded.changes],
            [change.at_ns - t0_ns for change in recorded.changes],
            [change.node for change in recorded.changes],
            [change.subject for change in recorded.changes],
            [change.text for change in recorded.changes],
        ],
        schema=CHANGES_SCHEMA,
    )
    pq.write_table(table.replace_schema_metadata({"t0_ns": str(t0_ns)}), changes)


def read(*, telemetry: Path, changes: Path) -> Recorded:
    """Read both files. The cost of watching each machine is elsewhere (`watched` in evidence/measured/telemetry.json).

    Raises:
        RecordError: one of the files is missing or has another format.
    """
    values: dict[tuple[int, str], dict[str, int]] = {}
    for row in parquet.read(telemetry, TELEMETRY_SCHEMA).to_pylist():
        values.setdefault((row["t_ns"], row["node"]), {})[row["name"]] = row["value"]
    return Recorded(
        samples=tuple(Sample(at_ns=at_ns, node=node, values=moved) for (at_ns, node), moved in values.items()),
        changes=tuple(
            Change(at_ns=row["t_ns"], node=row["node"], subject=row["subject"], text=row["text"])
            for row in parquet.read(changes, CHANGES_SCHEMA).to_pylist()
        ),
    )
