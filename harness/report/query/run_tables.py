"""Run directories as SQL tables in memory: `runs`, `checks`, `faults` and `points`.

A run that is damaged, unfinished, mixed from two runs, or a copy of another one is left out, with the reason. So is a
sweep that names a run which was left out. The evidence of a workload is some hundred times as long as
a verdict. Only its end is read, which shows whether it is complete.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import operator
import os
import sqlite3
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC
from pathlib import Path
from typing import TypeVar

import msgspec

from faultbed.harness import verdict as verdict_file
from faultbed.harness.record import sweep_file
from faultbed.harness.record.copies import copies_among
from faultbed.harness.record.evidence.environment import Environment
from faultbed.harness.record.run_files import RUN_FILES, decoded, read_file, started_of
from faultbed.harness.record.sweep_file import SweepFile, SweptPoint
from faultbed.harness.verdict import VerdictFile
from faultbed.testbed.errors import RecordError, UsageError

__all__ = ["ALL_COLUMNS", "TABLES", "RunTables", "load"]

TABLES: Mapping[str, str] = {
    "runs": "run TEXT PRIMARY KEY, experiment TEXT, seed, lab TEXT, verdict TEXT, lab_state TEXT, started TEXT, "
    "version TEXT, code TEXT, accelerator TEXT, cpu_count INTEGER, sweep TEXT, point INTEGER",
    "checks": "run TEXT, name TEXT, verdict TEXT, observed, bound, unit TEXT, comparison TEXT, estimand TEXT, "
    "rule TEXT, why TEXT, detail TEXT",
    "faults": "run TEXT, id TEXT, kind TEXT, target TEXT, fidelity TEXT, proven INTEGER, unproven TEXT, armed INTEGER, "
    "fired INTEGER, first_s REAL, last_s REAL, witness TEXT, cleared INTEGER, cleared_by TEXT",
    "points": "sweep TEXT, point INTEGER, parameters TEXT, verdict TEXT, why TEXT, runs INTEGER, metric TEXT, "
    "unit TEXT, value, low REAL, high REAL, censored INTEGER",
}
"""Columns of each table, as SQL. A column without a type holds numbers and text: a check can observe either."""
ALL_COLUMNS: Mapping[str, Collection[str]] = {
    table: tuple(column.split()[0] for column in columns.split(", ")) for table, columns in TABLES.items()
}
"""Names of the columns of each table."""
_NO_VERDICT = "it has no verdict: it still runs, or it was killed"
_NO_EVIDENCE = "it has no evidence: it was killed, or it is an incomplete copy"
_MOST_BYTES = 64 << 20
"""Maximum size of a `verdict.json` or `sweep.json` that is read, a hundred times the longest one seen so far."""
_LAB, _WORKLOAD = "evidence/measured/lab.json", "evidence/measured/workload.json"
_LARGEST = 2**63
"""SQLite's integers have 64 bits with a sign; a seed has 64 without."""
_S = 1e-9

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTables:
    """The tables in memory, how many runs they hold, and the directories that are left out, with the reason."""

    connection: sqlite3.Connection
    runs: int
    left_out: Mapping[str, str]


class _PlannedFault(msgspec.Struct, frozen=True, gc=False):
    id: str
    kind: str


class _PlanHead(msgspec.Struct, frozen=True):
    """The fields of `plan.json` that a verdict repeats. The others, which take most of the time, are not decoded."""

    experiment: str
    seed: int
    faults: tuple[_PlannedFault, ...]


class _Named(msgspec.Struct, frozen=True):
    name: str


_decode_plan = msgspec.json.Decoder(_PlanHead).decode
# Runs of one machine have equal files.
_decode_environment = functools.lru_cache(1024)(msgspec.json.Decoder(Environment).decode)
_decode_lab = functools.lru_cache(64)(msgspec.json.Decoder(_Named).decode)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    path: Path
    verdict: VerdictFile
    environment: Environment


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Suspend the collection of cycles. Verdicts have none, and the search for them takes a fifth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_without_collection()
def load(folders: Sequence[Path], reads: Mapping[str, Collection[str]] = ALL_COLUMNS) -> RunTables:
    """Read every run and sweep below some folders. The order of the runs is that of their paths.

    A run that is reached twice, by overlapping folders or by a link, is read once. Of the tables, only the columns in
    `reads` are filled, and a table that is not in it stays empty; every run is checked all the same.

    Raises:
        UsageError: a folder does not exist, or no run below them can be read.
    """
    run_paths, sweep_paths = _found(folders)
    left_out: dict[str, str] = {}
    runs: list[_Run] = []
    for path in run_paths:
        try:
            runs.append(_read_run(path))
        except (UsageError, OSError) as error:
            left_out[str(path)] = str(error)
    try:
        copies = copies_among([run.path / _WORKLOAD for run in runs])
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}; repeat the query when nothing moves the runs") from error
    left_out |= {str(copy.parents[2]): f"it is a copy of {original.parents[2]}" for copy, original in copies.items()}
    runs = [run for run in runs if run.path / _WORKLOAD not in copies]
    if not runs:
        why = "".join(f"; {path}: {reason}" for path, reason in list(left_out.items())[:1])
        raise UsageError(f"{', '.join(map(str, folders))}: no run to query{why}; name the folder of run directories")
    sweeps = list(_read_sweeps(sweep_paths, runs, left_out))
    return RunTables(connection=_tables(runs, sweeps, reads), runs=len(runs), left_out=left_out)


def _found(folders: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Return the run directories and the folders of sweeps below some folders, each once, by name."""
    runs: list[str] = []
    sweeps: list[str] = []
    to_visit = [str(folder) for folder in _apart(folders)]
    while to_visit:
        folder = to_visit.pop()
        try:
            with os.scandir(folder) as found:
                entries = {entry.name: entry for entry in found}
        except OSError:
            continue  # it was removed meanwhile, or is another user's
        if "sweep.json" not in entries and not RUN_FILES.isdisjoint(entries):
            runs.append(folder)
            continue
        if "sweep.json" in entries:
            sweeps.append(folder)
        to_visit += [entry.path for entry in entries.values() if entry.is_dir(follow_symlinks=False)]
    return [Path(name) for name in sorted(runs)], [Path(name) for name in sorted(sweeps)]


def _apart(folders: Sequence[Path]) -> list[Path]:
    """Return the folders without duplicates and without those that lie in another one of them."""
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder; name the folder that contains the run directories")
    folder_at = {folder.resolve(): folder for folder in reversed(folders)}
    return [folder for place, folder in folder_at.items() if folder_at.keys().isdisjoint(place.parents)]


def _read_run(path: Path) -> _Run:
    """Read what a table needs of one run.

    Raises:
        UsageError: a file is missing or damaged, or the files are of two runs.
        OSError: a file cannot be read.
    """
    verdict = _decoded(f"{path}/verdict.json", verdict_file.decode, missing=_NO_VERDICT)
    plan = _decoded(f"{path}/plan.json", _decode_plan)
    environment = _decoded(f"{path}/environment.json", _decode_environment)
    planned = {fault.id: fault.kind for fault in plan.faults}
    pairs = (
        ("experiment", verdict.experiment, "plan.json", plan.experiment),
        ("seed", verdict.seed, "plan.json", plan.seed),
        ("lab", verdict.lab, _LAB, _lab_of(path)),
        *(
            (f"fault {one.id}", one.kind, "plan.json", planned.get(one.id, "none of that name"))
            for one in verdict.faults
        ),
    )
    for field, judged, name, recorded in pairs:
        if judged != recorded:
            raise RecordError(
                f"{path / 'verdict.json'}: {field} {judged}, but {recorded} in {name}: they are of two runs; copy the "
                "run directory again"
            )
    return _Run(path=path, verdict=verdict, environment=environment)


def _lab_of(path: Path) -> str:
    """Return the lab that a run was measured on, from its evidence. Only the end of the workload's evidence is read.

    Raises:
        RecordError: a file does not begin or end as this version writes it: it is damaged or cut off.
        OSError: it cannot be read.
    """
    lab = read_file(f"{path}/{_LAB}", most_bytes=_MOST_BYTES, missing=_NO_EVIDENCE)
    for name, end in ((_LAB, lab[-2:]), (_WORKLOAD, _end_of(f"{path}/{_WORKLOAD}"))):
        if end != b"}\n":
            raise RecordError(f"{path / name}: not whole; copy the run directory again")
    return decoded(f"{path}/{_LAB}", lab, _decode_lab).name


def _decoded(path: str, decode: Callable[[bytes], T], *, missing: str = "") -> T:
    return decoded(path, read_file(path, most_bytes=_MOST_BYTES, missing=missing), decode)


def _end_of(path: str) -> bytes:
    """Return the last two bytes of a file of evidence, which may be long."""
    size = _checked_size(path, _NO_EVIDENCE)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.pread(descriptor, 2, max(0, size - 2))
    finally:
        os.close(descriptor)


def _checked_size(path: str, missing: str) -> int:
    """Return the size of a file, in bytes.

    Raises:
        UsageError: it is missing, no regular file, or longer than `_MOST_BYTES`.
    """
    try:
        status = os.stat(path)  # noqa: PTH116 - of thousands of runs: making a Path takes longer
    except OSError as error:
        raise UsageError(missing) from error
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{path}: no regular file; copy the run directory again")
    if status.st_size > _MOST_BYTES:
        raise RecordError(f"{path}: {status.st_size} bytes, of at most {_MOST_BYTES}; copy the run directory again")
    return status.st_size


def _read_sweeps(
    folders: Iterable[Path], runs: Sequence[_Run], left_out: dict[str, str]
) -> Iterator[tuple[Path, SweepFile, Mapping[Path, int]]]:
    """Yield each sweep with its folder and the point of each of its runs; those that disagree with a run are left out.

    `sweep.json` is derived from run directories, which may have been removed, replaced or found damaged since.
    """
    verdict_of = {run.path: run.verdict for run in runs}
    for folder in folders:
        try:
            _checked_size(f"{folder}/sweep.json", "it has no sweep.json")
            sweep = sweep_file.read(folder)
        except (UsageError, OSError) as error:
            left_out[str(folder)] = str(error)
            continue
        if sweep is None:
            continue
        listed = [(point.number, folder / run.run_dir, run) for point in sweep.points for run in point.runs]
        stale = next(
            (
                path
                for _, path, run in listed
                if (known := verdict_of.get(path)) is None or (known.verdict, known.seed) != (run.verdict, run.seed)
            ),
            None,
        )
        if stale is not None:
            reason = left_out.get(str(stale), "that run has another verdict now, or is gone")
            left_out[str(folder)] = (
                f"its sweep.json names {stale}: {reason}; repeat the sweep's command to judge it again"
            )
            continue
        yield folder, sweep, {path: number for number, path, _ in listed}


def _tables(
    runs: Sequence[_Run],
    sweeps: Sequence[tuple[Path, SweepFile, Mapping[Path, int]]],
    reads: Mapping[str, Collection[str]],
) -> sqlite3.Connection:
    """Return a database in memory with the tables."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    for table, columns in TABLES.items():
        connection.execute(f"CREATE TABLE {table} ({columns})")
    place_of = {path: (str(folder), number) for folder, _, points in sweeps for path, number in points.items()}
    rows_of: Mapping[str, Iterator[tuple[object, ...]]] = {
        "runs": (_run_row(run, *place_of.get(run.path, (None, None))) for run in runs),
        "checks": (row for run in runs for row in _check_rows(run)),
        "faults": (row for run in runs for row in _fault_rows(run)),
        "points": (row for folder, sweep, _ in sweeps for row in _point_rows(folder, sweep)),
    }
    connection.execute("BEGIN")
    for table in reads:
        _insert(connection, table, reads[table], rows_of[table])
    connection.execute("COMMIT")
    return connection


def _insert(
    connection: sqlite3.Connection, table: str, reads: Collection[str], rows: Iterable[tuple[object, ...]]
) -> None:
    """Insert the first column, so that rows can be counted, and those that are read."""
    names = ALL_COLUMNS[table]
    numbers = [number for number, name in enumerate(names) if number == 0 or name in reads]
    columns = ", ".join(name for number, name in enumerate(names) if number in numbers)
    of_row = operator.itemgetter(*numbers) if len(numbers) > 1 else operator.itemgetter(slice(1))
    marks = ", ".join("?" * len(numbers))
    connection.executemany(f"INSERT INTO {table} ({columns}) VALUES ({marks})", map(of_row, rows))  # noqa: S608 - the names are constants


def _run_row(run: _Run, sweep: str | None, point: int | None) -> tuple[object, ...]:
    verdict, environment = run.verdict, run.environment
    return (
        str(run.path), verdict.experiment, _cell(verdict.seed), verdict.lab, str(verdict.verdict), verdict.lab_state,
        f"{started_of(run.path).astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}", environment.git or environment.faultbed,
        environment.code, environment.accelerator, environment.cpu_count, sweep, point,
    )  # fmt: skip


def _check_rows(run: _Run) -> Iterator[tuple[object, ...]]:
    name = str(run.path)
    for check in run.verdict.checks:
        yield (
            name, check.name, str(check.verdict), _cell(check.observed), _cell(check.bound), check.unit,
            check.comparison, check.estimand, check.rule.kind, check.why,
            check.detail,
        )  # fmt: skip


def _fault_rows(run: _Run) -> Iterator[tuple[object, ...]]:
    name = str(run.path)
    for fault in run.verdict.faults:
        fired, cleared = fault.fired, fault.cleared
        yield (
            name, fault.id, fault.kind, fault.target, fault.fidelity, fault.proved, "; ".join(fault.unproven) or None,
            fault.armed.ok, _cell(fired.count), _seconds(fired.first_ns), _seconds(fired.last_ns), fired.witness,
            cleared.ok, cleared.by,
        )  # fmt: skip


def _point_rows(folder: Path, sweep: SweepFile) -> Iterator[tuple[object, ...]]:
    """Yield a row for each metric of each point; one without a value where the point has none."""
    for point in sweep.points:
        of_metric = {value.metric: value for value in point.values}
        for metric in sweep.metrics or ("",):
            value = of_metric.get(metric)
            numbers: tuple[object, ...] = (None, None, None, None, None)
            if value is not None:
                numbers = (value.unit, _cell(value.value), value.low, value.high, value.censored)
            yield (str(folder), *_point_cells(point), metric, *numbers)


def _point_cells(point: SweptPoint) -> tuple[object, ...]:
    verdict = None if point.verdict is None else str(point.verdict)
    return point.number, msgspec.json.encode(point.parameters).decode(), verdict, point.why, len(point.runs)


def _cell(value: float | str | None) -> float | str | None:
    """Return a value as SQLite stores it: an integer that does not fit into 64 bits with a sign becomes text."""
    if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        return str(value)
    return None if isinstance(value, float) and math.isnan(value) else value


def _seconds(time_ns: int | None) -> float | None:
    return None if time_ns is None else time_ns * _S
