"""Write measured traffic row by row for other tools: CSV or Parquet, by the file's suffix.

For ranks, a row is an iteration of one rank (`faultbed.traffic.engine.run_results.Iteration`); for flows, a bin at one
end of a flow (`faultbed.traffic.engine.run_results.Sample`). Times are in ns; `start_ns` counts from the earliest row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from faultbed.testbed.errors import UsageError
from faultbed.traffic.flows.flow_run import FlowResult
from faultbed.traffic.workloads.ranks_result import RanksResult

__all__ = ["FORMATS", "check", "of_flows", "of_ranks", "write"]

FORMATS = (".csv", ".parquet")
_ITERATION = ("compute_ns", "comm_ns", "wait_ns", "ingest_ns", "read_ns", "checkpoint_ns", "wrong_elements")
Rows = Sequence[Mapping[str, Any]]


def of_ranks(result: RanksResult) -> Rows:
    """Return a row for each iteration of each rank: rank, RNIC, iteration, start, duration and its parts."""
    rows = [
        {
            "rank": rank,
            "rnic": result.ranks[rank],
            "iteration": iteration.index,
            "start_ns": iteration.start_ns,
            "duration_ns": iteration.end_ns - iteration.start_ns,
            **{name: getattr(iteration, name) for name in _ITERATION},
        }
        for rank, iterations in enumerate(result.iterations)
        for iteration in iterations
    ]
    return _from_zero(rows)


def of_flows(flows: Sequence[FlowResult]) -> Rows:
    """Return a row for each bin: the flow's number and ends, the end that saw the completions, the bin, its bytes."""
    rows = [
        {
            "flow": number,
            "src": flow.spec.src,
            "dst": flow.spec.dst,
            "seen_at": sample.endpoint,
            "start_ns": sample.start_ns,
            "duration_ns": sample.duration_ns,
            "size_bytes": sample.size_bytes,
        }
        for number, flow in enumerate(flows)
        for sample in flow.samples
    ]
    return _from_zero(rows)


def check(path: Path) -> None:
    """Reject a file that could not be written at the end, before anything runs.

    Raises:
        UsageError: the suffix is not in `FORMATS`, or the folder does not exist.
    """
    if path.suffix not in FORMATS:
        raise UsageError(f"--out {path}: a name ends in {' or '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise UsageError(f"--out {path}: there is no folder {path.parent}")


def write(rows: Rows, path: Path) -> None:
    """Write rows of one kind. Without rows, the file has no columns."""
    # Half a second to import, and most commands write no table.
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.csv  # noqa: PLC0415
    import pyarrow.parquet  # noqa: PLC0415

    writers: Mapping[str, Callable[..., None]] = {".csv": pa.csv.write_csv, ".parquet": pa.parquet.write_table}
    writers[path.suffix](pa.Table.from_pylist(list(rows)), path)


def _from_zero(rows: Sequence[dict[str, Any]]) -> Rows:
    first_ns = min((row["start_ns"] for row in rows), default=0)
    return [{**row, "start_ns": row["start_ns"] - first_ns} for row in rows]
