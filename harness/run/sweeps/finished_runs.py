"""Finished runs of a sweep: which of a folder's run directories count again, and joining those of several folders."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from faultbed.harness.experiment import run_plan
from faultbed.harness.record import code
from faultbed.harness.record.run_key import machine_of, may_publish, publish, published_name
from faultbed.harness.record.rundir import RunDir
from faultbed.harness.run.sweeps.sweep_points import Point
from faultbed.testbed.errors import RecordError, UsageError

__all__ = ["find_finished_runs", "join"]

_RUN_FILES = ("experiment.toml", "plan.json", "verdict.json")
"""Files of which a run directory has at least one; the folder of a pool has none of them."""
_Match = tuple[int, int]
"""The number of a point, and a seed."""


def find_finished_runs(runs: Path, points: Sequence[Point]) -> dict[int, list[RunDir]]:
    """Return the finished runs of the points, by the point's number, in order of seeds.

    Args:
        runs: folder of run directories; it may be missing. Other experiments' runs in it are ignored.
        points: the points whose runs to look for.
    """
    by_plan = _by_plan(points)
    found: dict[_Match, RunDir] = {}
    for run in _runs_in(runs):
        try:
            found[_match(run, by_plan)] = run
        except (UsageError, OSError):
            continue
    if found:
        newest = _machine_of(max(found.values(), key=lambda run: (run.started, run.path.name)))
        found = {match: run for match, run in found.items() if _machine_of(run) == newest}
    finished: dict[int, list[RunDir]] = {}
    for (number, _), run in sorted(found.items()):
        finished.setdefault(number, []).append(run)
    return finished


def join(folders: Sequence[Path], out: Path, points: Sequence[Point], progress: Callable[[str], None]) -> None:
    """Copy the finished runs of the points from other folders into `out`, each whole and under its key.

    Args:
        folders: each a folder of run directories, or of a sweep.
        out: the folder of run directories to copy to.
        points: the points whose runs to copy.
        progress: receives a line for each run that is left out, with the reason.

    Raises:
        UsageError: a folder does not exist or has no run of the points, or runs were made on two kinds of machine.
        OSError: a run cannot be copied.
    """
    by_plan = _by_plan(points)
    counted: list[RunDir] = []
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"--merge {folder}: no such folder; name the --out of each shard")
        own: list[RunDir] = []
        for run in _runs_in(folder / "runs" if (folder / "runs").is_dir() else folder):
            try:
                _match(run, by_plan)
                own.append(run)
            except (UsageError, OSError) as error:
                progress(f"left out: {error}")
        if not own:
            raise UsageError(f"--merge {folder}: no finished run of this command; give the options of its shards")
        counted += own
    machines = {_machine_of(run): run.path for run in counted}
    if len(machines) > 1:
        (first, path), (second, other) = list(machines.items())[:2]
        raise UsageError(
            f"--merge: {path} was made with {first}, {other} with {second}; merge shards of one kind of machine"
        )
    out.mkdir(parents=True, exist_ok=True)
    for run in counted:
        if run.path.resolve().parent != out.resolve():
            _copy(run, out)


def _copy(run: RunDir, out: Path) -> None:
    """Copy a run into a folder. It gets its name there when it is whole.

    Raises:
        UsageError: its name there is taken by a directory that is damaged.
        OSError: it cannot be copied.
    """
    with tempfile.TemporaryDirectory(dir=out, prefix=".incoming-") as temporary:
        copy = RunDir(Path(temporary) / run.path.name)
        shutil.copytree(run.path, copy.path, symlinks=True)
        if publish(copy, out) is copy:
            raise UsageError(f"{out / published_name(run)}: damaged, or of another run; remove it, then merge again")


def _by_plan(points: Sequence[Point]) -> Mapping[tuple[bytes, bytes], _Match]:
    return {
        (resolved.source, run_plan.encode(resolved.plan)): (point.number, resolved.plan.seed)
        for point in points
        for resolved in point.runs
    }


def _runs_in(folder: Path) -> Iterator[RunDir]:
    """Yield the run directories of a folder; a hidden one is a copy that is not whole yet."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not path.name.startswith(".") and any((path / name).is_file() for name in _RUN_FILES):
            yield RunDir(path)


def _machine_of(run: RunDir) -> str:
    return machine_of(run.read_environment())


def _match(run: RunDir, by_plan: Mapping[tuple[bytes, bytes], _Match]) -> _Match:
    """Return the point's number and the seed of a finished run.

    A run by other sources of faultbed does not count, nor does one with zero intensity (`--control`), one that ended in
    ERROR or left the lab DIRTY, nor a directory with the files of two runs.

    Raises:
        UsageError: it is not of these points, or does not count.
    """
    match = by_plan.get((run.read_experiment(), run.read_bytes("plan.json")))
    if match is None:
        raise RecordError(f"{run.path}: it is no run of this experiment, plan and inventory")
    if not may_publish(run):
        raise RecordError(f"{run.path}: it ended in ERROR, left the lab DIRTY or is a control run; run it again")
    if run.read_environment().code != code.digest():
        raise RecordError(f"{run.path}: other sources of faultbed made it; run it again with these")
    return match
