"""Traces that experiments replay: locate the files, compare them with the plan, and load what is replayed.

The path in an experiment is relative to its file. A run directory has a copy of the trace below `trace/`, which is
used if the path does not exist: `repro.sh` runs the copy of the experiment in the run directory.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from faultbed.harness.experiment.declare.field_types import Choice, Count, Flag, Number, Text
from faultbed.harness.experiment.declare.section import Wrong
from faultbed.harness.experiment.rank_fields import OnRanks, same_fields
from faultbed.testbed.errors import UsageError
from faultbed.traffic import traces
from faultbed.traffic.traces import FORMATS, Trace
from faultbed.traffic.workloads.replay_batches import ReplaySpec, check

__all__ = ["COPY", "Replay", "digest", "file_or_copy", "keep", "spec_of", "trace_of"]

COPY = "trace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay(OnRanks):
    """A trace that is replayed `repeat` times, after `warmup` replays that do not count.

    `replay` is the path in the experiment file, `sha256` the digest of its files (`faultbed.traffic.traces.digest`).
    """

    replay: Annotated[str, Text("The trace: a file or folder, relative to the experiment file.")]
    sha256: str = ""
    format: Annotated[str | None, Choice("Format of the trace; default: by the names of the files.", among=FORMATS)] = (
        None
    )
    mirror: Annotated[bool, Flag("The trace of one rank stands for all: each does what that one does.")] = False
    groups: Annotated[str | None, Text("File with the ranks of process groups (JSON), for Chakra traces.")] = None
    speed: Annotated[float, Number("Factor by which pauses are shortened.", above=0)] = 1.0
    compute: Annotated[bool, Flag("Keep the pauses between operations.")] = True
    scale: Annotated[float, Number("Factor of all sizes.", above=0)] = 1.0
    shrink: Annotated[bool, Flag("Replay only the first ranks of a trace with more ranks than RNICs.")] = False
    skip_unsupported: Annotated[bool, Flag("Skip records that cannot be replayed.")] = False
    repeat: Annotated[int, Count("How many times it is replayed.", least=1)] = 1

    def decoded(self, source: str) -> Replay:
        """Return the replay with the digest of its files.

        Raises:
            Wrong: there is no such trace.
        """
        try:
            work = replace(self, sha256=digest(self.replay, self.groups, source))
        except UsageError as error:
            raise Wrong("replay", str(error)) from error
        check(spec_of(work))
        return work


def digest(path: str, groups: str | None, source: str) -> str:
    """Return the SHA-256 of a trace that the experiment `source` names.

    Raises:
        UsageError: there is no such trace.
    """
    return traces.digest(
        file_or_copy(path, source, COPY), groups=None if groups is None else file_or_copy(groups, source, COPY)
    )


def trace_of(work: Replay, source: str, ranks: int) -> Trace:
    """Return the trace that is replayed on `ranks` RNICs.

    Raises:
        ConfigError: the files are invalid; the message names file and record.
        UsageError: the files are missing, differ from those planned, or have another number of ranks.
    """
    if digest(work.replay, work.groups, source) != work.sha256:
        raise UsageError(f"{work.replay} has changed since the run was planned; plan it again")
    trace = traces.load(
        file_or_copy(work.replay, source, COPY),
        form=work.format,
        ranks=ranks,
        mirror=work.mirror,
        groups=None if work.groups is None else file_or_copy(work.groups, source, COPY),
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
    return ReplaySpec(**same_fields(ReplaySpec, work), pauses=work.compute)


def keep(work: Replay, source: str, folder: Path) -> None:
    """Copy the files of a trace to `trace/` in `folder`.

    Raises:
        UsageError: they cannot be copied.
    """
    trace_path = file_or_copy(work.replay, source, COPY)
    target = folder / COPY
    try:
        target.mkdir(exist_ok=True)
        into = target / trace_path.name if trace_path.is_dir() else target
        into.mkdir(exist_ok=True)
        for file in traces.files_of(trace_path):
            shutil.copyfile(file, into / file.name)
        if work.groups is not None:
            shutil.copyfile(file_or_copy(work.groups, source, COPY), target / Path(work.groups).name)
    except OSError as error:
        raise UsageError(f"{target}: the trace cannot be kept there: {error.strerror or error}") from error


def file_or_copy(text: str, source: str, copies: str) -> Path:
    """Return the file at a path of the experiment `source`; if it is gone, its copy in `copies` beside it."""
    original = Path(source).parent / text
    copy = Path(source).parent / copies / original.name
    return copy if copy.exists() and not original.exists() else original
