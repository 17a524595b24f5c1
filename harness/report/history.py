"""Index a folder of run directories (SQLite), and find runs that are worse than earlier ones.

`.history.sqlite` next to the runs holds what a table needs. It is built from the run directories, of which only new or
changed ones are read again; if it is deleted, it is rebuilt. An index from another version of faultbed is rebuilt, too,
because CI keeps folders of runs for longer than one version. Runs are comparable if they have the same plan (seed,
inventory, workload, faults, routing scheme, and probes, capture and bystander), by any version, and ran on the same
kind of machine (accelerator and number of CPUs). Their verdicts are comparable if their expectations are also the same.

A value is a regression if it lies beyond the prediction interval of earlier runs: the mean of their logarithms plus t *
s * sqrt(1 + 1/n), Student's t at 99.5 % (one side), from at least `MIN_EARLIER` of them, none ERROR. A recovery
must lie beyond it by more than a bin of goodput. A verdict that changes from PASS to FAIL is a regression, too,
even with undecided runs in between. A value that is only a lower bound (goodput did not recover before the end) can be
a regression, but later runs are not compared with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import sqlite3
import statistics
import tomllib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

import faultbed
from faultbed.harness import judge
from faultbed.harness.conditions import unmet
from faultbed.harness.confidence import LEVEL, student
from faultbed.harness.record.copies import digest_of
from faultbed.harness.record.rundir import RunDir, open_run
from faultbed.harness.report.comparison.compare import HIGHER_IS_BETTER
from faultbed.testbed.errors import UsageError

__all__ = ["FILE", "MIN_EARLIER", "TRACKED", "History", "Past", "Regression", "read", "regressions", "update"]

FILE = ".history.sqlite"
MIN_EARLIER = 4
_ROUNDING = 1e-9
"""Tolerance for a mean of logarithms. Earlier runs may have identical values, such as a fixed number of iterations."""
_STEP = {"recovery.total": 0.1, "after_clear.total": 0.1}
"""Resolution of metrics that are read from bins of goodput, in s: equal times may be a bin apart."""
TRACKED = ("jct_ratio", "recovery.total", "after_clear.total", "dip", "goodput.mean", "busbw.mean", "iterations")
"""Metrics that are stored and compared. Earlier values that are 0 or missing are not compared. If a metric that should
be high becomes 0, that is a regression.

Runs with a fault or a routing scheme that is not proven, or with more load than the emulation forwards, have no metrics
in the index."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS run (
    name TEXT PRIMARY KEY, changed_ns INTEGER, experiment TEXT, seed TEXT, lab TEXT, version TEXT, series TEXT,
    expectations TEXT, verdict TEXT, lab_state TEXT, digest TEXT, started TEXT);
CREATE TABLE IF NOT EXISTS metric (name TEXT, metric TEXT, value REAL, at_least INTEGER, PRIMARY KEY (name, metric));
CREATE TABLE IF NOT EXISTS left_out (name TEXT PRIMARY KEY, changed_ns INTEGER, why TEXT);
"""
_TABLES = ("run", "metric", "left_out")
_MADE_BY = zlib.crc32(f"{faultbed.__version__} {TRACKED} {_SCHEMA} of runs with all conditions met".encode()) >> 1
"""Identifies the version and schema that built an index, as SQLite's `user_version`: a signed number of 32 bits
(sqlite.org, "PRAGMA")."""


_NO_VERDICT = "it has no verdict: it still runs, or it was killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """One run of the index. Runs of one `series` are comparable, and their verdicts if their `expectations` are equal.

    `version` is git's, if known. `at_least` names metrics whose value in `metrics` is only a lower bound.
    """

    name: str
    experiment: str
    seed: int
    lab: str
    version: str
    series: str
    expectations: str
    verdict: str
    lab_state: str
    metrics: Mapping[str, float]
    at_least: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Runs of a folder, oldest first; `left_out` maps those without a verdict, or not readable, to the reason."""

    past: tuple[Past, ...]
    left_out: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Regression:
    """A metric (or the verdict) of a run that is worse than earlier runs of its series predict."""

    run: str
    metric: str
    words: str


def update(runs: Path) -> Path:
    """Update the index of a folder of runs, and return its path.

    Raises:
        UsageError: the folder does not exist or is not writable.
    """
    if not runs.is_dir():
        raise UsageError(f"{runs}: no such folder; name the folder that contains the run directories")
    path = runs / FILE
    try:
        # A connection's own `with` ends its transaction but does not close it.
        with contextlib.closing(sqlite3.connect(path)) as index, index:
            if index.execute("PRAGMA user_version").fetchone() != (_MADE_BY,):
                for table in _TABLES:
                    index.execute(f"DROP TABLE IF EXISTS {table}")
                index.execute(f"PRAGMA user_version = {_MADE_BY}")
            index.executescript(_SCHEMA)
            _refresh(index, runs)
    except sqlite3.Error as error:
        raise UsageError(f"{path}: {error}; delete it; it is rebuilt from the runs") from error
    return path


def read(index: Path) -> History:
    """Return all runs of an index. Copies of a run are left out, because they would count as further runs."""
    metrics: dict[str, dict[str, float]] = {}
    bounds: dict[str, set[str]] = {}
    with contextlib.closing(sqlite3.connect(index)) as connection:
        for name, metric, value, at_least in connection.execute("SELECT name, metric, value, at_least FROM metric"):
            metrics.setdefault(name, {})[metric] = value
            if at_least:
                bounds.setdefault(name, set()).add(metric)
        rows = connection.execute(
            "SELECT name, experiment, seed, lab, version, series, expectations, verdict, lab_state, digest FROM run "
            "ORDER BY started, name"  # not by name: published runs are named by a key, without a time
        ).fetchall()
        left_out = dict(connection.execute("SELECT name, why FROM left_out ORDER BY name").fetchall())
    originals: dict[str, str] = {}
    for row in rows:
        if (original := originals.setdefault(row[-1], row[0])) != row[0]:
            left_out[row[0]] = f"it is a copy of {original}"
    past = tuple(
        Past(
            name=name,
            experiment=experiment,
            seed=int(seed),
            lab=lab,
            version=version,
            series=series,
            expectations=expectations,
            verdict=verdict,
            lab_state=lab_state,
            metrics=metrics.get(name, {}),
            at_least=frozenset(bounds.get(name, ())),
        )
        for name, experiment, seed, lab, version, series, expectations, verdict, lab_state, _ in rows
        if name not in left_out
    )
    return History(past=past, left_out=left_out)


def regressions(past: Sequence[Past]) -> tuple[Regression, ...]:
    """Return what got worse in each run, compared with the earlier runs of the same series."""
    worse: list[Regression] = []
    earlier: dict[str, list[Past]] = {}
    for run in past:
        before = earlier.setdefault(run.series, [])
        alike = [earlier_run for earlier_run in before if earlier_run.expectations == run.expectations]
        decided = next(
            (earlier_run for earlier_run in reversed(alike) if earlier_run.verdict in ("PASS", "FAIL")), None
        )
        if decided is not None and (decided.verdict, run.verdict) == ("PASS", "FAIL"):
            words = f"FAIL, and {decided.name} before it was a PASS"
            worse.append(Regression(run=run.name, metric="verdict", words=words))
        for metric in TRACKED:
            is_unknown = metric in run.at_least and metric in HIGHER_IS_BETTER
            words = _worse(metric, None if is_unknown else run.metrics.get(metric), _values(metric, before))
            if words:
                words = f"at least {words}" if metric in run.at_least else words
                worse.append(Regression(run=run.name, metric=metric, words=words))
        if run.verdict != "ERROR":
            before.append(run)
    return tuple(worse)


def _values(metric: str, past: Sequence[Past]) -> list[float]:
    """Return the values with which later runs can be compared: positive, and not only lower bounds."""
    return [run.metrics[metric] for run in past if run.metrics.get(metric, 0) > 0 and metric not in run.at_least]


def _worse(metric: str, value: float | None, earlier: Sequence[float]) -> str:
    """Explain a value beyond the prediction interval of earlier ones; empty if it is within, or not known."""
    if value is None or len(earlier) < MIN_EARLIER:
        return ""
    if value <= 0:
        if metric not in HIGHER_IS_BETTER:
            return ""
        return f"{value:.3g}, and {len(earlier)} earlier runs have at least {min(earlier):.3g}"
    logs = [math.log(earlier_value) for earlier_value in earlier]
    middle, spread = statistics.fmean(logs), statistics.stdev(logs)
    reach = student(len(logs) - 1, LEVEL) * spread * math.sqrt(1 + 1 / len(logs))
    sign = -1 if metric in HIGHER_IS_BETTER else 1
    if sign * (math.log(value) - middle) <= reach + _ROUNDING:
        return ""
    limit = math.exp(middle + sign * reach)
    if sign * (value - limit) <= _STEP.get(metric, 0.0) * (1 + _ROUNDING):
        return ""
    return (
        f"{value:.3g}, {value / math.exp(middle):.2f} times the earlier value; {len(logs)} earlier runs suggest "
        f"{'at least' if sign < 0 else 'at most'} {limit:.3g}"
    )


def _refresh(index: sqlite3.Connection, runs: Path) -> None:
    known = dict(
        index.execute("SELECT name, changed_ns FROM run UNION SELECT name, changed_ns FROM left_out").fetchall()
    )
    changed_ns_of = {path.parent.name: path.stat().st_mtime_ns for path in runs.glob("*/verdict.json")}
    for name in known.keys() - changed_ns_of.keys():
        _forget(index, name)
    for name in sorted(changed_ns_of):
        if known.get(name) != changed_ns_of[name]:
            _forget(index, name)
            _add(index, runs / name, changed_ns_of[name])
    for name in sorted({path.parent.name for path in runs.glob("*/experiment.toml")} - changed_ns_of.keys()):
        index.execute("INSERT INTO left_out VALUES (?, ?, ?)", (name, 0, _NO_VERDICT))


def _add(index: sqlite3.Connection, path: Path, changed_ns: int) -> None:
    run = open_run(path)
    try:
        verdict, plan, measured = run.read_verdict(), run.read_plan(), run.read_run()
        environment, expected = run.read_environment(), _expectations_of(run)
        run.refuse_mixed(verdict, plan, measured)
    except UsageError as error:  # another version recorded it, or the copy is incomplete
        index.execute("INSERT INTO left_out VALUES (?, ?, ?)", (path.name, changed_ns, str(error)))
        return
    observed = judge.observed_of(measured, run.read_evidence(judge.KINDS))
    made_by = [environment.accelerator, environment.cpu_count]
    series = _digest([msgspec.structs.replace(plan, faultbed=""), made_by])
    index.execute(
        "INSERT INTO run VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            path.name,
            changed_ns,
            verdict.experiment,
            str(verdict.seed),  # SQLite has no integers of 64 bits without a sign
            verdict.lab,
            environment.git or environment.faultbed,
            series,
            expected,
            verdict.verdict,
            verdict.lab_state,
            digest_of(measured),
            run.started.isoformat(),
        ),
    )
    # Values that were measured while, for example, a fault did nothing must not be a reference for other runs.
    tracked = () if unmet(verdict.checks) else TRACKED
    observations = {name: observed.metrics[name] for name in tracked if name in observed.metrics}
    index.executemany(
        "INSERT INTO metric VALUES (?, ?, ?, ?)",
        [
            (path.name, name, float(observation.value), observation.censored)
            for name, observation in observations.items()
            if isinstance(observation.value, int | float) and math.isfinite(observation.value)
        ],
    )


def _expectations_of(run: RunDir) -> str:
    """Return a digest of what the experiment of a run expects: the sections that decide its verdict.

    Raises:
        UsageError: the experiment file is missing, or not TOML.
    """
    try:
        raw = tomllib.loads(run.read_experiment().decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{run.path / 'experiment.toml'}: not TOML: {error}; copy the run directory again") from error
    return _digest([raw.get("expect"), raw.get("stop")])


def _digest(content: object) -> str:
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()[:16]


def _forget(index: sqlite3.Connection, name: str) -> None:
    for table in _TABLES:
        index.execute(f"DELETE FROM {table} WHERE name = ?", (name,))  # noqa: S608 - table names are constants
