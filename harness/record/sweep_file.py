"""`sweep.json` and `sweep.parquet`: the points of a sweep, with their verdicts and measurements.

A point that is INCONCLUSIVE or ERROR has no values, and `why` has the reason. A point without a verdict has not been
run yet, or not as often as planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from faultbed.harness.json_text import json_text
from faultbed.harness.record.run_files import whole
from faultbed.harness.verdict import LabState, Verdict, worst
from faultbed.testbed.errors import UsageError

__all__ = [
    "SweepFile",
    "SweptParameter",
    "SweptPoint",
    "SweptRun",
    "SweptValue",
    "decode",
    "encode",
    "lab_state_of",
    "read",
    "verdict_of",
    "write",
    "write_table",
]


class SweptParameter(msgspec.Struct, frozen=True, kw_only=True):
    """A path of the experiment file and the values that it is given, as text."""

    path: str
    values: tuple[str, ...]


class SweptRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a point; `run_dir` is relative to the folder of the sweep."""

    seed: int
    run_dir: str
    verdict: Verdict
    lab_state: LabState
    took_s: float


class SweptValue(msgspec.Struct, frozen=True, kw_only=True):
    """A metric at a point, in `unit`.

    `value` None: it is unknown, for the reason in `detail`. `low` and `high` are its interval; both None: there is no
    interval. If only `high` is None, the upper end is unknown: for a 99th percentile of few values, or for a censored
    value. `censored`: the true value is at least this one. `predicted` is the prediction of a model, if there is one.
    """

    metric: str
    unit: str
    value: float | int | str | None
    low: float | None = None
    high: float | None = None
    level: float | None = None
    censored: bool = False
    detail: str = ""
    predicted: float | None = None


class SweptPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One combination of parameter values: `parameters` has the value of each path."""

    number: int
    parameters: dict[str, str]
    verdict: Verdict | None = None
    why: str = ""
    runs: tuple[SweptRun, ...] = ()
    values: tuple[SweptValue, ...] = ()


class SweepFile(msgspec.Struct, frozen=True, kw_only=True):
    """`sweep.json`. Each point is run `repeat` times, with the seeds from `seed` on."""

    schema: Literal[1] = 1
    faultbed: str
    experiment: str
    lab: str
    seed: int
    repeat: int
    over: tuple[SweptParameter, ...]
    metrics: tuple[str, ...]
    verdict: Verdict
    lab_state: LabState
    points: tuple[SweptPoint, ...]
    model: str = ""
    """What `predicted` is computed with, in words; empty: no point has a prediction."""

    @property
    def is_complete(self) -> bool:
        """Whether every point has been run as often as planned."""
        return all(point.verdict is not None for point in self.points)


def verdict_of(points: Iterable[SweptPoint]) -> Verdict:
    """Return the worst verdict of the points; a point that has not been run counts as INCONCLUSIVE."""
    return worst(point.verdict or Verdict.INCONCLUSIVE for point in points)


def lab_state_of(points: Iterable[SweptPoint]) -> LabState:
    """Return DIRTY if any run left the lab DIRTY."""
    return "DIRTY" if any(run.lab_state == "DIRTY" for point in points for run in point.runs) else "CLEAN"


def encode(sweep: SweepFile) -> bytes:
    """Return `sweep.json` as bytes."""
    return json_text(sweep)


def decode(content: bytes) -> SweepFile:
    """Read `sweep.json`.

    Raises:
        msgspec.MsgspecError: not a sweep of schema 1.
    """
    return msgspec.json.decode(content, type=SweepFile)


def read(folder: Path) -> SweepFile | None:
    """Read `sweep.json` of a folder; None: it has none.

    Raises:
        UsageError: it is not as this version writes it.
    """
    path = folder / "sweep.json"
    if not path.exists():
        return None
    try:
        return decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        remedy = "its runs are kept beside it: remove sweep.json, and sweep again with the same --out"
        raise UsageError(f"{path}: not as this version writes it: {error}; {remedy}") from error


def write(sweep: SweepFile, folder: Path) -> Path:
    """Write `sweep.json` into a folder, whole or not at all."""
    with whole(folder / "sweep.json") as temporary:
        temporary.write_bytes(encode(sweep))
    return folder / "sweep.json"


def write_table(sweep: SweepFile, folder: Path) -> Path:
    """Write `sweep.parquet` into a folder: one row per point and metric, one column per path."""
    # pyarrow takes a third of a second to import, and most commands write no tables.
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    columns = {
        **{f"over:{parameter.path}": pa.string() for parameter in sweep.over},
        "point": pa.int32(), "verdict": pa.string(), "why": pa.string(), "runs": pa.int32(), "metric": pa.string(),
        "unit": pa.string(), "value": pa.float64(), "name": pa.string(), "low": pa.float64(), "high": pa.float64(),
        "level": pa.float64(), "censored": pa.bool_(), "detail": pa.string(), "predicted": pa.float64(),
    }  # fmt: skip
    table = pa.Table.from_pylist(list(_rows(sweep)), schema=pa.schema(columns.items()))
    with whole(folder / "sweep.parquet") as temporary:
        pq.write_table(table, temporary)
    return folder / "sweep.parquet"


def _rows(sweep: SweepFile) -> Iterator[dict[str, object]]:
    for point in sweep.points:
        by_metric = {value.metric: value for value in point.values}
        for metric in sweep.metrics:
            value = by_metric.get(metric)
            is_number = value is not None and isinstance(value.value, int | float)
            yield {
                **{f"over:{path}": text for path, text in point.parameters.items()},
                **({} if value is None else msgspec.structs.asdict(value)),
                "point": point.number,
                "verdict": None if point.verdict is None else str(point.verdict),
                "why": point.why,
                "runs": len(point.runs),
                "metric": metric,
                "value": value.value if is_number and value else None,
                "name": value.value if value and isinstance(value.value, str) else None,
            }
