"""`probes.parquet`: every probe beside the workload, with its path and that of its answer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from faultbed.harness.record import parquet
from faultbed.testbed.errors import RecordError
from faultbed.traffic.probes.results import ProbeTrips
from faultbed.traffic.probes.rtt import STAMPS, Echo, Trip

__all__ = ["PROBES_SCHEMA", "read", "write"]


def _column(name: str, kind: pa.DataType, meaning: str, *, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=nullable, metadata={"meaning": meaning})


_PATH = pa.dictionary(pa.int32(), pa.string())

PROBES_SCHEMA = pa.schema(
    [
        _column("t_ns", pa.int64(), "when it was posted, controller monotonic ns"),
        _column("since_start_ns", pa.int64(), "t_ns - t0_ns of the run"),
        _column("connection", pa.int32(), "its queue pair"),
        _column("there", _PATH, "nodes that it crossed, RNICs at both ends"),
        _column("back", _PATH, "nodes that its answer crossed, or would have"),
        _column("came", pa.bool_(), "whether it came to its responder"),
        _column("whole_ns", pa.int64(), "until its answer was read; null: none was", nullable=True),
        _column("responder_ns", pa.int64(), "of that, at the responder; null: not answered", nullable=True),
    ]
)
"""Columns of `probes.parquet`; one row per probe. File metadata: `t0_ns`; `stamps`, what took the timestamps;
`unknown`, the number of probes that are left out because their path is unknown; `trouble`, why probing ended early, or
why paths are unknown."""


def write(probes: ProbeTrips, path: Path, *, t0_ns: int) -> None:
    """Write probes, with the columns of `PROBES_SCHEMA`."""
    rows = [
        {
            "t_ns": trip.echo.sent_ns,
            "since_start_ns": trip.echo.sent_ns - t0_ns,
            "connection": trip.echo.connection,
            "there": " ".join(trip.there),
            "back": " ".join(trip.back),
            "came": trip.echo.came,
            "whole_ns": trip.echo.whole_ns,
            "responder_ns": trip.echo.responder_ns,
        }
        for trip in probes.trips
    ]
    metadata = {"t0_ns": str(t0_ns), "stamps": STAMPS, "unknown": str(probes.unknown), "trouble": probes.trouble or ""}
    pq.write_table(pa.Table.from_pylist(rows, schema=PROBES_SCHEMA.with_metadata(metadata)), path)


def read(path: Path) -> ProbeTrips:
    """Read a file that `write` has written.

    Raises:
        RecordError: the file is missing or has another format, or a probe is repeated.
    """
    table = parquet.read(path, PROBES_SCHEMA)
    metadata, columns = table.schema.metadata, table.to_pydict()
    paths = {text: tuple(text.split()) for name in ("there", "back") for text in set(columns[name])}
    trips = tuple(
        Trip(
            there=paths[there],
            back=paths[back],
            echo=Echo(connection=connection, sent_ns=at_ns, came=came, whole_ns=whole, responder_ns=responder),
        )
        for at_ns, connection, there, back, came, whole, responder in zip(
            *(columns[name] for name in ("t_ns", "connection", "there", "back", "came", "whole_ns", "responder_ns")),
            strict=True,
        )
    )
    counts = Counter(trips)
    if repeated := next((trip.echo for trip, count in counts.items() if count > 1), None):
        problem = f"the probe of connection {repeated.connection} at {repeated.sent_ns} ns appears twice"
        raise RecordError(f"{path}: {problem}; copy the run directory again")
    try:
        return ProbeTrips(trips=trips, unknown=int(metadata[b"unknown"]), trouble=metadata[b"trouble"].decode() or None)
    except (TypeError, KeyError, ValueError) as error:
        raise RecordError(
            f"{path}: cannot be read: its metadata is not that of probes ({error!r}); copy the run directory again, or "
            "remove the file"
        ) from error
