"""Commands of the documentation, typed in terminals of their own."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import stand_ins
from house import HOUSE
from pages import NAMED
from waiting import until

PATIENCE_S = 120.0


@functools.cache
def _house(base: Path) -> Path:
    house = base / "house"
    house.mkdir()
    stand_ins.make(house)
    return house


def working_directory(base: Path, tmp_path: Path) -> Path:
    """Return a new folder with the files that pages name; not the checkout. They are made once below `base`."""
    return Path(shutil.copytree(_house(base), tmp_path / "here", symlinks=True))


def argv(text, folder):
    """Return the arguments of a line as a shell would, with placeholders replaced and patterns expanded."""
    words = [NAMED.get(word, word) for word in shlex.split(text)]
    assert words[0] == "faultbed"
    meant = [_files(word, folder) if "*" in word and " " not in word else [word] for word in words[1:]]
    return [
        sys.executable,
        "-c",
        "from faultbed.harness.console import main; main()",
        *itertools.chain.from_iterable(meant),
    ]


def _files(pattern, folder):
    actual = sorted(str(path.relative_to(folder)) for path in folder.glob(pattern))
    assert actual, pattern
    return actual


def environment(**more):
    path = os.pathsep.join(filter(None, [str(HOUSE), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "COLUMNS": "200", "PYTHONPATH": path, **more}


@dataclass(frozen=True, kw_only=True)
class Terminal:
    """A running command, and the file with its output."""

    process: subprocess.Popen
    log: Path

    @property
    def is_over(self):
        return self.process.poll() is not None

    def output(self):
        return self.log.read_text(errors="replace")

    def wait_for_output(self, word):
        """Wait until the command has printed this text."""
        until(lambda: word in self.output() or self.is_over, within_s=PATIENCE_S)
        assert word in self.output(), self.output()

    def ends(self):
        return self.process.wait(PATIENCE_S)


@contextlib.contextmanager
def terminal(text, folder, env):
    """Start a command. At the end of the block it is interrupted, if it still runs."""
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix="said-", delete=False) as file:
        process = subprocess.Popen(
            argv(text, folder), stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=folder, env=env
        )
    try:
        yield Terminal(process=process, log=Path(file.name))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def typed(text, folder, env, *, patience_s=PATIENCE_S):
    """Run a command to its end; return its exit code and its output."""
    with terminal(text, folder, env) as one:
        return one.process.wait(patience_s), one.output()


def check(text, expected, folder, env, **patience):
    code, output = typed(f"{text} {expected.more}", folder, env, **patience)
    assert code in expected.codes, output
    assert expected.says in output, output
    assert not expected.makes or list(folder.glob(expected.makes)), output
    assert "Traceback" not in output
