"""Traces in files and folders: which format, which rank, all of them together."""

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
    """A trace: a folder with a file a rank (`3.json`, `name.3.et`), or one PARAM file that stands for all ranks.

    `form` is param or chakra (None: by the files' names). `ranks` is how many there are, where the trace does not say.
    `groups` is a JSON file with the ranks of process groups, for Chakra traces that do not have them.

    Raises:
        ConfigError: something in the files is wrong; with file and record.
        UsageError: there are no such files.
    """
    if form is not None and form not in FORMATS:
        raise UsageError(f'no trace format "{form}"; there is {", ".join(FORMATS)}')
    files = _files(path)
    found = {ENDINGS[_ending(file)] for file in files.values()}
    form = form or found.pop()
    if found - {form}:
        raise UsageError(f"{path}: has files of two formats; name one with --format")
    files = {rank: file for rank, file in files.items() if ENDINGS[_ending(file)] == form}
    contents = {rank: _content(file) for rank, file in files.items()}
    if form == "param":
        one = path.is_file()
        world = ranks if one else len(files)
        read = [
            param.read(str(file), contents[rank], rank=None if one else rank, world=world)
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
    """The files of a trace, by rank.

    Raises:
        UsageError: there are no such files.
    """
    return tuple(file for _, file in sorted(_files(path).items()))


def digest(path: Path, *, groups: Path | None = None) -> str:
    """SHA-256 (hex) of a trace: of its file, or of the names and digests of its files, as sha256sum lists them.

    With `groups` that file is one of them.

    Raises:
        UsageError: there are no such files, or one cannot be read.
    """
    files = [*files_of(path), *([groups] if groups is not None else [])]
    try:
        found = [(hashlib.sha256(file.read_bytes()).hexdigest(), file.name) for file in files]
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror or error}") from error
    if path.is_file() and groups is None:
        return found[0][0]
    return hashlib.sha256("".join(f"{one}  {name}\n" for one, name in found).encode()).hexdigest()


def _ending(file: Path) -> str:
    return ".".join(file.name.split(".")[-2:]) if file.suffix == ".gz" else file.suffix.lstrip(".")


def _files(path: Path) -> dict[int, Path]:
    if path.is_file():
        if _ending(path) not in ENDINGS:
            raise UsageError(f"{path}: not a trace by its name; those end with {', '.join(ENDINGS)}")
        if ENDINGS[_ending(path)] == "chakra":
            raise UsageError(f"{path}: a Chakra trace has a file for each rank; name the folder that they are in")
        return {0: path}
    if not path.is_dir():
        raise UsageError(f"{path}: no such trace; name a file, or a folder with a file for each rank")
    files: dict[int, Path] = {}
    for file in sorted(path.iterdir()):
        if match := NAMED.fullmatch(file.name):
            rank = int(match["rank"])
            if rank in files:
                raise UsageError(f"{path}: {files[rank].name} and {file.name} are both of rank {rank}")
            files[rank] = file
    if not files:
        raise UsageError(f"{path}: no file in it is named like a rank's trace, as 0.json or job.0.et")
    return files


def _content(file: Path) -> bytes:
    try:
        content = file.read_bytes()
        return gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{file}: the trace is cut off: {error}; get the whole file again") from error
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror or error}") from error


def _groups(file: Path) -> dict[str, list[int]]:
    try:
        raw = json.loads(file.read_bytes())
        return {str(name): [int(rank) for rank in ranks] for name, ranks in raw.items()}
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror or error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f'{file}: not a file of groups, as in {{"0": [0, 1]}}: {error}') from error


def save(trace: Trace, folder: Path, *, form: str) -> tuple[Path, ...]:
    """Write a trace, one file a rank, into a folder that is made where there is none; the files.

    Raises:
        UsageError: the folder has traces already, or the format cannot say this.
    """
    if form not in FORMATS:
        raise UsageError(f'no trace format "{form}"; there is {", ".join(FORMATS)}')
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder}: is there and not an empty folder; name another one")
    content_for, name = (param.content_for, "{}.json") if form == "param" else (chakra.content_for, "rank.{}.et")
    contents = [content_for(trace, rank) for rank in range(trace.ranks)]
    folder.mkdir(parents=True, exist_ok=True)
    paths = tuple(folder / name.format(rank) for rank in range(trace.ranks))
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths
