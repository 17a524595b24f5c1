"""Stand-ins for a machine's tools: each is a shell script that sends requests to a thread of the test's process.

To start Python for each of a thousand commands would take most of the time of these tests.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import io
import os
import shutil
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

Answer = Callable[[list[str], TextIO], None]
"""Prints to a file what the tool prints for its arguments; ends with another status by SystemExit, as a program."""

_SCRIPT = """\
#!/bin/sh
printf '%s\\0' "$#" "$0" "$@" > {pipes}/asked
read -r status < {pipes}/answered
while IFS= read -r line; do printf '%s\\n' "$line"; done < {pipes}/out
test "$status" = 0 || cat {pipes}/err >&2
exit "$status"
"""
_ANSWERS: dict[str, Answer] = {}


def serve(path: Path, answer: Answer) -> None:
    """Put a program at a path that prints an answer to its arguments."""
    path.write_text(_SCRIPT.format(pipes=_pipes()))
    path.chmod(0o755)
    _ANSWERS[str(path)] = answer


def serve_script(path: Path, text: str) -> None:
    """Put a program at a path that does what a Python script does with its `sys.argv`, `sys.exit` and `print`."""
    code = compile(text, str(path), "exec")

    def answer(argv: list[str], out: TextIO) -> None:
        own = SimpleNamespace(argv=[str(path), *argv], exit=sys.exit)

        def imported(name: str, *rest: object) -> object:
            return own if name == "sys" else builtins.__import__(name, *rest)

        def printed(*words: object, file: TextIO = out) -> None:
            print(*words, file=file)

        exec(code, {"__builtins__": {**vars(builtins), "__import__": imported, "print": printed}})

    serve(path, answer)


@functools.cache
def _pipes() -> Path:
    """Return the pipes at which a thread of this process answers."""
    folder = Path(tempfile.mkdtemp(prefix="served-tools-"))
    for name in ("asked", "answered"):
        os.mkfifo(folder / name)
    atexit.register(shutil.rmtree, folder)
    threading.Thread(target=_serve, args=(folder,), daemon=True).start()
    return folder


def _serve(folder: Path) -> None:
    # Both pipes are open for reading and writing here, so that neither ever ends.
    requests, answered = (os.open(folder / name, os.O_RDWR) for name in ("asked", "answered"))
    rest = b""
    while True:
        *words, rest = (rest + os.read(requests, 1 << 16)).split(b"\0")
        if not words or len(words) < int(words[0]) + 2:
            rest = b"\0".join((*words, rest))
            continue
        out, err = io.StringIO(), io.StringIO()
        _, program, *argv = map(os.fsdecode, words)
        status = _status(program, argv, out=out, err=err)
        (folder / "out").write_text(out.getvalue())
        (folder / "err").write_text(err.getvalue())
        os.write(answered, f"{status}\n".encode())


def _status(program: str, argv: list[str], *, out: TextIO, err: TextIO) -> int:
    try:
        _ANSWERS[program](argv, out)
    except SystemExit as end:
        if not isinstance(end.code, str):
            return int(end.code or 0)
        print(end.code, file=err)
    except Exception:  # noqa: BLE001 - as Python would: a traceback, and status 1
        traceback.print_exc(file=err)
    else:
        return 0
    return 1
