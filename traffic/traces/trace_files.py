"""Load and save traces. The name of a file gives its format and its rank."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from faultbed.testbed.errors import ConfigError, UsageError
from faultbed.testbed.extras import extra
from faultbed.traffic.traces import param
from faultbed.traffic.traces.join import joined
from faultbed.traffic.traces.trace import RankTrace, Trace, group_of

__all__ = ["FORMATS", "digest", "files_of", "load", "save"]

FORMATS = ("param", "chakra")
ENDINGS = {"json": "param", "json.gz": "param", "et": "chakra", "et.gz": "chakra"}
FILE_NAME = re.compile(r"(?:.*?[._-])?(?:rank)?(?P<rank>[0-9]+)\.(?P<ending>json|json\.gz|et|et\.gz)")


def load(
    path: Path,
    *,
    form: str | None = None,
    ranks: int | None = None,
    groups: Path | None = None,
    mirror: bool = False,
) -> Trace:
    """Load a trace: a folder with one file per rank (`3.json`, `name.3.et`), or one file for all ranks.

    Args:
        path: the folder or the file.
        form: the format, one of `FORMATS`; None: the format of the files, which must all have the same.
        ranks: number of ranks of a single file.
        groups: JSON file with the ranks of each process group of a Chakra trace.
        mirror: every rank does what the only file says, which is one rank's; PARAM calls that `--use-one-trace`.

    Raises:
        UsageError: a file is missing, the files have two formats, or there is not the one file that `mirror` needs.
        ConfigError: a file is truncated or is not a trace.
    """
    if form is not None and form not in FORMATS:
        raise UsageError(f'no trace format "{form}"; choose one of {", ".join(FORMATS)}')
    files = _file_by_rank(path)
    contents = {rank: _content(file) for rank, file in files.items()}
    formats = {rank: _format(file, contents[rank]) for rank, file in files.items()}
    if form is None and len(set(formats.values())) > 1:
        raise UsageError(f"{path}: has files of two formats; choose one with --format")
    form = form or formats[min(formats)]
    files = {rank: file for rank, file in files.items() if formats[rank] == form}
    if not files:
        raise UsageError(f"{path}: its files are {formats[min(formats)]} traces, not {form}; leave --format out")
    if mirror:
        return joined(str(path), form, [_mirrored(path, form, files, contents, ranks, groups)])
    if form == "chakra" and path.is_file():
        raise UsageError(f"{path}: a Chakra trace has one file per rank; name their folder, or give --mirror")
    if form == "param":
        is_single_file = path.is_file()
        world = ranks if is_single_file else len(files)
        parts = [
            param.read(str(file), contents[rank], rank=None if is_single_file else rank, world=world)
            for rank, file in sorted(files.items())
        ]
    else:
        ranks_by_group = _ranks_by_group(groups) if groups is not None else {}
        parts = [
            _chakra().read(str(file), contents[rank], rank=rank, world=len(files), groups=ranks_by_group)
            for rank, file in sorted(files.items())
        ]
    return joined(str(path), form, parts)


def files_of(path: Path) -> tuple[Path, ...]:
    """Return the files of a trace, in the order of their ranks.

    Raises:
        UsageError: the path is not a trace.
    """
    return tuple(file for _, file in sorted(_file_by_rank(path).items()))


def digest(path: Path, *, groups: Path | None = None) -> str:
    """Return the SHA-256 (hex) of a trace.

    For a single file it is that of the file. For several files, also if `groups` is given, it is that of the lines
    that sha256sum prints for them.

    Raises:
        UsageError: a file does not exist or cannot be read.
    """
    files = [*files_of(path), *([groups] if groups is not None else [])]
    try:
        digests = [(hashlib.sha256(file.read_bytes()).hexdigest(), file.name) for file in files]
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror or error}") from error
    if path.is_file() and groups is None:
        return digests[0][0]
    return hashlib.sha256("".join(f"{file_digest}  {name}\n" for file_digest, name in digests).encode()).hexdigest()


def _chakra() -> ModuleType:
    with extra("chakra", "a Chakra trace"):
        from faultbed.traffic.traces import chakra  # noqa: PLC0415 - protobuf is an optional package

        return chakra


def _ending(file: Path) -> str:
    return ".".join(file.name.split(".")[-2:]) if file.suffix == ".gz" else file.suffix.lstrip(".")


def _file_by_rank(path: Path) -> dict[int, Path]:
    if path.is_file():
        if _ending(path) not in ENDINGS:
            raise UsageError(f"{path}: the name of a trace ends with {' or '.join(ENDINGS)}; rename the file")
        return {0: path}
    if not path.is_dir():
        raise UsageError(f"{path}: no such trace; name a file, or a folder with one file per rank")
    files: dict[int, Path] = {}
    for file in sorted(path.iterdir()):
        if match := FILE_NAME.fullmatch(file.name):
            rank = int(match["rank"])
            if rank in files:
                raise UsageError(f"{path}: {files[rank].name} and {file.name} both belong to rank {rank}")
            files[rank] = file
    if not files:
        raise UsageError(f"{path}: no file in the folder is named like a rank's trace, such as 0.json or job.0.et")
    return files


_CHAKRA_JSON = re.compile(rb'\s*\{\s*("version"|"attr"|"workload_graph"|\}\s*\{)')
"""How a Chakra trace in JSON begins: with the metadata of its jsonizer, or the graph of its feeder."""


def _format(file: Path, content: bytes) -> str:
    return "chakra" if _CHAKRA_JSON.match(content) else ENDINGS[_ending(file)]


def _mirrored(
    path: Path,
    form: str,
    files: Mapping[int, Path],
    contents: Mapping[int, bytes],
    ranks: int | None,
    groups: Path | None,
) -> RankTrace:
    """Return the trace of all ranks that the only file stands for."""
    if len(files) != 1 or ranks is None:
        raise UsageError(
            f"{path}: has files of {len(files)} ranks; --mirror takes one, which stands for all ranks: name that file"
        )
    ((rank, file),) = files.items()
    if form == "param":
        return param.read(str(file), contents[rank], rank=None, world=ranks)
    by_group = _ranks_by_group(groups) if groups is not None else {}
    trace: RankTrace = _chakra().read(
        str(file), contents[rank], rank=min(rank, ranks - 1), world=ranks, groups=by_group
    )
    return dataclasses.replace(trace, rank=None)


def _content(file: Path) -> bytes:
    try:
        content = file.read_bytes()
        return gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{file}: the trace is truncated: {error}; copy the whole file again") from error
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror or error}") from error


def _ranks_by_group(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        raw = json.loads(file.read_bytes())
        return {str(name): group_of([int(rank) for rank in ranks]) for name, ranks in raw.items()}
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror or error}") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f'{file}: not a file of groups, such as {{"0": [0, 1]}}: {error}') from error


def save(trace: Trace, folder: Path, *, form: str) -> tuple[Path, ...]:
    """Write a trace, one file per rank, into a new or empty folder, and return the files.

    Raises:
        UsageError: the folder is not empty, or the format cannot represent the trace.
    """
    if form not in FORMATS:
        raise UsageError(f'no trace format "{form}"; choose one of {", ".join(FORMATS)}')
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder}: exists and is not an empty folder; name another one")
    content_for, name_format = (
        (param.content_for, "{}.json") if form == "param" else (_chakra().content_for, "rank.{}.et")
    )
    contents = [content_for(trace, rank) for rank in range(trace.ranks)]
    folder.mkdir(parents=True, exist_ok=True)
    paths = tuple(folder / name_format.format(rank) for rank in range(trace.ranks))
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths
