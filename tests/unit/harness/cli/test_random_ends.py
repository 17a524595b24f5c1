"""`faultbed inject` and a run, ended by a random signal at a random time, report the lab's state correctly.

Real processes: the command line, its holder and the holder's guardian. Only QEMU is a stand-in. Its link is read
independently of faultbed. The workload of the run only takes time (`local_run`).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from house import HOUSE, SUPPORT
from local_lab import lab_at
from qmp_server import Qemu
from waiting import until

from faultbed.testbed.observe import counters, fingerprint
from faultbed.testbed.tenancy import dirty

pytestmark = pytest.mark.process
SEED = 25
LEASE_S, END_S = 12.0, 120.0
COMMANDS = {
    "inject": ("local_lab.py", "link.down", "host1:rxe0", "--for", "1s"),
    "run": ("local_run.py",),
}
ENDS = {
    "SIGINT": (signal.SIGINT,),
    "SIGTERM": (signal.SIGTERM,),
    "SIGHUP": (signal.SIGHUP,),
    "SIGKILL": (signal.SIGKILL,),
    "SIGINT twice": (signal.SIGINT, signal.SIGINT),
    "SIGTERM and SIGKILL": (signal.SIGTERM, signal.SIGKILL),
    "none": (),
}


@dataclass(frozen=True, kw_only=True)
class End:
    """Signals to one command: the first one `after_s` after its start or its fault's, the others `apart_s` later.

    The target takes `late_s` to revert, so that a command may end before the revert.
    """

    command: str
    how: str
    in_fault: bool
    after_s: float
    apart_s: float
    late_s: float


def drawn(command, count):
    chance = random.Random(f"{SEED} {command}")
    names = list(ENDS)
    return [
        End(
            command=command,
            how=names[index % len(names)],
            in_fault=(in_fault := chance.random() < 0.7),
            after_s=chance.uniform(0.0, 1.6 if in_fault else 3.0),
            apart_s=chance.uniform(0.0, 0.5),
            late_s=chance.choice((0.0, 0.7)),
        )
        for index in range(count)
    ]


def wrong(end):
    """Yield each false statement of faultbed about the lab after one such end."""
    with tempfile.TemporaryDirectory() as name:
        qemu = Qemu(Path(name) / "qmp")
        qemu.late_s = end.late_s
        try:
            return _wrong(end, Path(name), qemu)
        finally:
            qemu.close()


def _wrong(end, folder, qemu):
    path = os.pathsep.join((str(HOUSE), str(SUPPORT)))
    script, *more = COMMANDS[end.command]
    words = (str(SUPPORT / script), str(folder), *more)
    with subprocess.Popen(
        [sys.executable, *words], start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env={**os.environ, "PYTHONPATH": path},
    ) as process:  # fmt: skip
        if end.in_fault:
            until(lambda: qemu.links or process.poll() is not None, within_s=END_S)
        moment = time.monotonic() + end.after_s
        for number in ENDS[end.how]:
            threading.Event().wait(max(0.0, moment - time.monotonic()))
            if process.poll() is None:
                process.send_signal(number)
            moment = time.monotonic() + end.apart_s
        output = process.communicate(timeout=END_S)[0]
    is_up = not qemu.links or qemu.links[-1]
    return list(_lies(end, folder, qemu, rc=process.returncode, output=output, is_up=is_up))


def _lies(end, folder, qemu, *, rc, output, is_up):
    is_marked, unfinished = dirty.is_marked(folder), dirty.unfinished(folder)
    about = f"{end}: exit code {rc}, marked {is_marked}, unfinished {unfinished}, up {is_up}, said {output!r}"
    if "cleared and verified" in output and not is_up:
        yield f"claims that it has cleared: {about}"
    if not is_marked and not unfinished and (not is_up or rc == 5):
        yield f"false CLEAN: {about}"
    if is_marked and (len(ENDS[end.how]) < 2 or "end was not observed" not in dirty.reasons(folder)[0]):
        yield f"false DIRTY: {about}"
    if is_marked and rc not in (5, -signal.SIGKILL):
        yield f"DIRTY with another exit code: {about}"
    until(lambda: not qemu.links or qemu.links[-1], within_s=LEASE_S)
    lab = lab_at(folder)
    if is_marked:
        if left := dirty.settle(lab):
            yield f"stays DIRTY after its lease, {left}: {about}"
        return
    try:
        dirty.admit(lab)
    except dirty.DirtyLab as error:
        yield f"false DIRTY for the next command, {error}: {about}"
    if dirty.unfinished(folder):
        yield f"the next command did not look: {about}"


def campaign(command, count, monkeypatch):
    monkeypatch.setattr(counters, "read", counters.read)  # restores what `lab_at` replaces
    monkeypatch.setattr(fingerprint, "capture", fingerprint.capture)
    with ThreadPoolExecutor(max_workers=4) as pool:
        return [line for lines in pool.map(wrong, drawn(command, count)) for line in lines]


@pytest.mark.parametrize("command", COMMANDS)
def test_command_ended_at_random_reports_the_labs_true_state(monkeypatch, command):
    assert campaign(command, len(ENDS), monkeypatch) == []


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_command_ended_at_random_a_hundred_times_reports_the_labs_true_state(monkeypatch, command):
    assert campaign(command, 100, monkeypatch) == []
