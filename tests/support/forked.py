"""Commands of faultbed and sessions of pytest, each in a process that is forked after all imports.

The start of Python with the imports of the command line takes a second of CPU time on a small machine. A fork takes
hundredths of a second.
The command has its own process, environment, folder, search path and output, as it has in a shell.

python -P forked.py     the process that forks: it reads requests, and writes the exit status of each, line by line
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

TIMEOUT_S = 120.0


class Forked:
    """Starts commands; `close` ends the process that forks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def faultbed(
        self, argv: list[str], *, env: dict[str, str], cwd: Path, program: str = "faultbed.harness.cli"
    ) -> subprocess.CompletedProcess[str]:
        """Run the `main` of a program with these arguments, as `subprocess.run` does with captured output."""
        assert self._process.stdin
        assert self._process.stdout
        with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
            output = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (out, err)]
            request = {"program": program, "argv": argv, "env": env, "cwd": str(cwd), "output": output}
            self._process.stdin.write(f"{json.dumps(request)}\n")
            self._process.stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(self._process.stdout, selectors.EVENT_READ)
                if not selector.select(TIMEOUT_S):
                    self._process.kill()
                    raise subprocess.TimeoutExpired(argv, TIMEOUT_S)
            status = int(self._process.stdout.readline())
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(argv, status, out.read(), err.read())

    def close(self) -> None:
        """End the process that forks."""
        self._process.communicate(timeout=30)


def next_command() -> dict[str, Any] | None:
    """Return the request of a command, in the process that is forked for it; None once there are no more.

    Its program is imported before that, so that the next command of the same program finds it imported.
    """
    while line := sys.stdin.readline():
        request = json.loads(line)
        importlib.import_module(request["program"])
        gc.freeze()  # a collection in each command would copy the memory that it shares with this process
        if not (pid := os.fork()):
            return request
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


def become(request: dict[str, Any]) -> None:
    """Replace this process's environment, folder, search path, arguments and output by those of the command."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[:0] = filter(None, request["env"].get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = [request["program"], *request["argv"]]
    for number, path in enumerate((os.devnull, *request["output"])):
        opened = os.open(path, os.O_RDWR)
        os.dup2(opened, number)
        os.close(opened)


if __name__ == "__main__":
    import faultbed.harness.cli
    import faultbed.harness.run.loop  # noqa: F401 (half of what a run imports)

    sys.path.append(str(Path(__file__).parent))  # programs of the tests
    if (command := next_command()) is not None:
        become(command)
        importlib.import_module(command["program"]).main()
