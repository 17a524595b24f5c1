"""Traces that experiments replay: locate the files, compare them with the plan, and load what is replayed.

The path in an experiment is relative to its file. A run directory has a copy of the trace below `trace/`, which is
used if the path does not exist: `repro.sh` runs the copy of the experiment in the run directory.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from faultbed.testbed.errors import UsageError
from faultbed.traffic import traces
from faultbed.traffic.engine.task_specs import QpParams
from faultbed.traffic.traces import Trace
from faultbed.traffic.workloads.replay_batches import ReplaySpec

__all__ = ["COPY", "Replay", "digest", "keep", "spec_of", "trace_of"]

COPY = "trace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A trace that is replayed `repeat` times, after `warmup` replays that do not count.

    `replay` is the path in the experiment file. `groups` is the path of a file with process groups (Chakra only).
    `sha256` is the digest of both files (`faultbed.traffic.traces.digest`). With `compute`, the pauses of the trace
    are kept, divided by `speed`. The other fields have the meaning of the options of `faultbed traffic replay`.
    """

    replay: str
    sha256: str
    format: str | None
    groups: str | None
    speed: float
    compute: bool
    scale: float
    shrink: bool
    skip_unsupported: bool
    repeat: int
    warmup: int
    ranks: tuple[str, ...]
    qps_per_peer: int = 1
    spread: str = "split"
    entropy: int = 0
    qp: QpParams = field(default_factory=QpParams)


def digest(path: str, groups: str | None, source: str) -> str:
    """Return the SHA-256 of a trace that the experiment `source` names.

    Raises:
        UsageError: there is no such trace.
    """
    return traces.digest(_file(path, source), groups=None if groups is None else _file(groups, source))


def trace_of(work: Replay, source: str, ranks: int) -> Trace:
    """Return the trace that is replayed on `ranks` RNICs.

    Raises:
        ConfigError: the files are invalid; the message names file and record.
        UsageError: the files are missing, differ from those planned, or have another number of ranks.
    """
    if digest(work.replay, work.groups, source) != work.sha256:
        raise UsageError(f"{work.replay} has changed since the run was planned; plan it again")
    trace = traces.load(
        _file(work.replay, source),
        form=work.format,
        ranks=ranks,
        groups=None if work.groups is None else _file(work.groups, source),
    )
    if trace.ranks > ranks and not work.shrink:
        raise UsageError(
            f"{work.replay} has {trace.ranks} ranks, but there are {ranks} RNICs; set shrink = true to replay only the "
            f"operations among its first {ranks} ranks"
        )
    fitted = traces.fitted(trace, ranks=ranks, scale=work.scale)
    blocking = [note for note in fitted.notes if note.blocks]
    if blocking and not work.skip_unsupported:
        first = blocking[0]
        raise UsageError(
            f"{first.file}: record {first.record}: {first.what} ({len(blocking)} such records); "
            "set skip_unsupported = true to replay the rest"
        )
    return fitted


def spec_of(work: Replay) -> ReplaySpec:
    """Return the specification of a replay for the traffic package."""
    return ReplaySpec(
        ranks=work.ranks,
        warmup=work.warmup,
        repeat=work.repeat,
        pauses=work.compute,
        speed=work.speed,
        qps_per_peer=work.qps_per_peer,
        spread=work.spread,
        entropy=work.entropy,
        qp=work.qp,
    )


def keep(work: Replay, source: str, folder: Path) -> None:
    """Copy the files of a trace to `trace/` in `folder`.

    Raises:
        UsageError: they cannot be copied.
    """
    trace_path = _file(work.replay, source)
    target = folder / COPY
    try:
        target.mkdir(exist_ok=True)
        into = target / trace_path.name if trace_path.is_dir() else target
        into.mkdir(exist_ok=True)
        for file in traces.files_of(trace_path):
            shutil.copyfile(file, into / file.name)
        if work.groups is not None:
            shutil.copyfile(_file(work.groups, source), target / Path(work.groups).name)
    except OSError as error:
        raise UsageError(f"{target}: the trace cannot be kept there: {error.strerror or error}") from error


def _file(text: str, source: str) -> Path:
    """Return the file at a path of the experiment `source`, or its copy beside the experiment."""
    original = Path(source).parent / text
    copy = Path(source).parent / COPY / original.name
    return copy if copy.exists() and not original.exists() else original
