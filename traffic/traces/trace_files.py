"""Load and save traces: detect the format and the rank of each file in a folder."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from pathlib import Path

from testbed.errors import ConfigError, UsageError
from traffic.traces import chakra, param
from traffic.traces.join import joined
from traffic.traces.trace import Trace

__all__ = ["FORMATS", "digest", "files_of", "load", "save"]

FORMATS = ("param", "chakra")
ENDINGS = {"json": "param", "json.gz": "param", "et": "chakra", "et.gz": "chakra"}
NAMED = re.compile(r"(?:.*?[._-])?(?:rank)?(?P<rank>[0-9]+)\.(?P<ending>json|json\.gz|et|et\.gz)")


def load(path: Path, *, form: str | None = None, ranks: int | None = None, groups: Path | None = None) -> Trace:
    """Load a trace: a folder with one file per rank (`3.json`, `name.3.et`), or one PARAM file for all ranks."""
    if form is not None and form not in FORMATS:
        raise UsageError(f'no trace format "{form}"; choose one of {", ".join(FORMATS)}')
    files = _files(path)
    formats = {ENDINGS[_ending(file)] for file in files.values()}
    form = form or formats.pop()
    if formats - {form}:
        raise UsageError(f"{path}: has files of two formats; choose one with --format")
    files = {rank: file for rank, file in files.items() if ENDINGS[_ending(file)] == form}
    contents = {rank: _content(file) for rank, file in files.items()}
    if form == "param":
        is_single_file = path.is_file()
        world = ranks if is_single_file else len(files)
        read = [
            param.read(str(file), contents[rank], rank=None if is_single_file else rank, world=world)
            for rank, file in sorted(files.items())
        ]
    else:
        known = _groups(groups) if groups is not None else {}
        read = [
            chakra.read(str(file), contents[rank], rank=rank, world=len(files), groups=known)
            for rank, file in sorted(files.items())
        ]
    return joined(str(path), form, read)


def files_of(path: Path) -> tuple[Path, ...]:
    """Return the files of a trace, by rank.

    Raises:
        UsageError: there are no such files.
    """
    return tuple(file for _, file in sorted(_files(path).items()))


def digest(path: Path, *, groups: Path | None = None) -> str:
    """Return the SHA-256 (hex) of a trace: of its single file, or of its files' names and digests as in sha256sum.

    The file `groups` is included, if given.

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


def _ending(file: Path) -> str:
    return ".".join(file.name.split(".")[-2:]) if file.suffix == ".gz" else file.suffix.lstrip(".")


def _files(path: Path) -> dict[int, Path]:
    if path.is_file():
        if _ending(path) not in ENDINGS:
            raise UsageError(f"{path}: the name of a trace ends with {' or '.join(ENDINGS)}; rename the file")
        if ENDINGS[_ending(path)] == "chakra":
            raise UsageError(f"{path}: a Chakra trace has one file per rank; name their folder")
        return {0: path}
    if not path.is_dir():
        raise UsageError(f"{path}: no such trace; name a file, or a folder with one file per rank")
    files: dict[int, Path] = {}
    for file in sorted(path.iterdir()):
        if match := NAMED.fullmatch(file.name):
            rank = int(match["rank"])
            if rank in files:
                raise UsageError(f"{path}: {files[rank].name} and {file.name} both belong to rank {rank}")
            files[rank] = file
    if not files:
        raise UsageError(f"{path}: no file in the folder is named like a rank's trace, such as 0.json or job.0.et")
    return files


def _content(file: Path) -> bytes:
    try:
        content = file.read_bytes()
        return gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{file}: the trace is truncated: {error}; copy the whole file again") from error
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror or error}") from error


def _groups(file: Path) -> dict[str, list[int]]:
    try:
        raw = json.loads(file.read_bytes())
        return {str(name): [int(rank) for rank in ranks] for name, ranks in raw.items()}
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
    content_for, name = (param.content_for, "{}.json") if form == "param" else (chakra.content_for, "rank.{}.et")
    contents = [content_for(trace, rank) for rank in range(trace.ranks)]
    folder.mkdir(parents=True, exist_ok=True)
    paths = tuple(folder / name.format(rank) for rank in range(trace.ranks))
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths
