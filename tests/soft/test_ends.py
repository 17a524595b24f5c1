"""Commands ended by a random signal at a random time: faultbed's statements about the lab are true.

After each end, the lab's fingerprint is taken independently of faultbed, and compared with the one before and with what
the command and the marks report. A changed lab without a DIRTY mark is a false CLEAN. A DIRTY mark on an unchanged lab
is a false DIRTY, unless the end of a fault was not seen (a second signal while it cleared).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from waiting import until, wait_s

from faultbed.testbed import shipped
from faultbed.testbed.backends.soft import lifecycle
from faultbed.testbed.directories import lab_dir
from faultbed.testbed.errors import DirtyLab
from faultbed.testbed.inventory import lab_inventory as inventory_module
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.lab import Lab, open_lab
from faultbed.testbed.observe import fingerprint
from faultbed.testbed.tenancy import dirty, in_progress

pytestmark = pytest.mark.soft

SEED = 25
COUNT = int(os.environ.get("FAULTBED_TEST_ENDS", "25"))
"""Ends of each command."""
END_S, LEASE_S = 300.0, 12.0
ENDS = {
    "SIGINT": (signal.SIGINT,),
    "SIGTERM": (signal.SIGTERM,),
    "SIGKILL": (signal.SIGKILL,),
    "SIGINT twice": (signal.SIGINT, signal.SIGINT),
    "SIGTERM and SIGKILL": (signal.SIGTERM, signal.SIGKILL),
}
PHASES = {
    "inject": ("", "preparing", "armed", "clearing"),
    "run": ("restoring the snapshot", "preparing", "workload is running", "armed", "cleared", "comparing"),
    "heal": ("",),
    "reset": ("", "restoring the snapshot"),
}
"""Words of the progress lines that a moment is counted from; the empty one is the start. Each must appear."""
INJECTED = (
    ("link.flap", "rtsw1:ctsw1"),
    ("link.flap", "host1:rxe1"),
    ("gpu.throttle", "host1:gpu0", "--set", "percent=50"),
)
EXPERIMENT = """
name = "ends"
lab = { kind = "soft" }
[workload]
collective = "all-reduce"
algorithm = "ring"
size = "64KiB"
duration = "14s"
[[faults]]
id = "uplink"
kind = "link.flap"
target = "rtsw1:ctsw1"
at = "7s"
for = "3s"
[[expect]]
metric = "wrong_elements"
max = 0
"""


@dataclass(frozen=True, kw_only=True)
class End:
    """Signals to a command: sent `after_s` after its progress reached `phase`, `apart_s` from each other."""

    command: str
    words: tuple[str, ...]
    how: str
    phase: str
    after_s: float
    apart_s: float


def drawn(command: str, folder: Path) -> Iterator[End]:
    """Return the ends of one command, the same ones each time."""
    chance = random.Random(f"{SEED} {command}")
    experiment = folder / "ends.toml"
    experiment.write_text(EXPERIMENT)
    for index in range(COUNT):
        injected = chance.choice(INJECTED)
        words = {
            "inject": ("inject", *injected, "--for", "3s"),
            "run": ("run", str(experiment), "--out", str(folder / "runs")),
        }.get(command, (command,))
        yield End(
            command=command,
            words=words,
            how=list(ENDS)[index % len(ENDS)],
            phase=chance.choice(PHASES[command]),
            after_s=chance.uniform(0.0, 3.0),
            apart_s=chance.uniform(0.0, 0.5),
        )


@pytest.fixture(scope="module")
def mini() -> Iterator[Inventory]:
    """Bring up a separate small lab, because an interrupted reset ends its machines."""
    inventory = inventory_module.load(shipped.inventories() / "soft-mini.yml")
    if lifecycle.status(inventory).state == "up":
        pytest.skip("soft-mini is up already: it may be in use")
    lifecycle.up(inventory, lambda _: None)
    yield inventory
    lifecycle.down(inventory)


def ended(inventory: Inventory, end: End, folder: Path) -> tuple[int, str]:
    """Start the command, end it in this way, and return its exit code and output.

    The command must reach the phase. If its progress texts had changed, no signal would be sent.
    """
    output = folder / "said"
    argv = [
        sys.executable,
        "-m",
        "faultbed",
        "--lab",
        str(inventory.path),
        *end.words,
    ]
    with output.open("wb") as out, subprocess.Popen(argv, stdout=out, stderr=out, start_new_session=True) as process:
        until(lambda: end.phase in output.read_text() or process.poll() is not None, within_s=END_S)
        assert end.phase in output.read_text(), f"never said {end.phase!r}: {end}: {output.read_text()}"
        moment = time.monotonic() + end.after_s
        for number in ENDS[end.how]:
            wait_s(max(0.0, moment - time.monotonic()))
            if process.poll() is None:
                process.send_signal(number)
            moment = time.monotonic() + end.apart_s
        process.wait(END_S)
    return process.returncode, output.read_text()


def differences(lab: Lab, before: fingerprint.Fingerprint) -> list[str]:
    """Return the differences of the lab, determined independently of faultbed."""
    return fingerprint.diff(before, fingerprint.capture(lab))


def lies(inventory: Inventory, before: fingerprint.Fingerprint, end: End, rc: int, output: str) -> Iterator[str]:
    """Return false or missing statements of faultbed about the lab, and restore the lab."""
    folder = lab_dir(inventory.name)
    marked, unfinished = dirty.reasons(folder), [mark.name for mark in in_progress.dead(folder)]
    about = f"{end}: exit code {rc}, marked {marked}, unfinished {unfinished}, said {output!r}"
    # On a busy machine, a VM may need more than the three seconds of `faultbed status` to send its SSH banner.
    patience_s = lifecycle.PATIENCE_BEFORE_END_S
    was_up = (state := lifecycle.status(inventory, patience_s=patience_s).state) == "up"
    if not was_up:
        if end.command not in ("run", "reset"):  # these two stop the lab's machines, and `status` shows that
            yield f"the lab is {state}: {about}"
        lifecycle.up(inventory, lambda _: None)
    with open_lab(inventory) as lab:
        says_clean = was_up and not marked and not unfinished and rc != DirtyLab.exit_code
        if says_clean and (left := differences(lab, before)):
            yield f"false CLEAN, {left}: {about}"
        if marked and was_up:
            wait_s(LEASE_S)
            is_unseen = len(ENDS[end.how]) > 1 and "end was not observed" in marked[0]
            if end.command != "heal" and not is_unseen and not fingerprint.settle(lab, before):
                yield f"false DIRTY: {about}"
            done = faultbed(inventory, "heal")
            if done.returncode:
                yield f"heal ends with {done.returncode}, {done.stdout}{done.stderr}: {about}"
        try:
            dirty.admit(lab)
        except DirtyLab as error:
            if not fingerprint.settle(lab, before):
                yield f"false DIRTY for the next command, {error}: {about}"
        left = differences(lab, before)
    if left:
        yield f"false CLEAN after the next command, {left}: {about}"
    if left or dirty.is_marked(folder):
        lifecycle.reset(inventory, lambda _: None)


def faultbed(inventory: Inventory, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a faultbed command to its end."""
    argv = [sys.executable, "-m", "faultbed", "--lab", str(inventory.path), *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=END_S)


@pytest.mark.slow
@pytest.mark.timeout(120 * COUNT)
@pytest.mark.parametrize("command", PHASES)
def test_command_ended_at_random_reports_the_labs_true_state(mini, tmp_path, command):
    lifecycle.reset(mini, lambda _: None)
    with open_lab(mini) as lab:
        before = fingerprint.capture(lab)
    collected = []
    for end in drawn(command, tmp_path):
        if command == "heal":  # leave something to heal: a port that a fault took down
            with open_lab(mini) as lab:
                lab.node("rtsw1").run(["ip", "link", "set", "dev", "ctsw1", "down"])
            dirty.mark(lab_dir(mini.name), ["rtsw1: link ctsw1 is down"], before)
        rc, output = ended(mini, end, tmp_path)
        wrong = list(lies(mini, before, end, rc, output))
        print(f"{end}: exit code {rc}; {wrong or 'true'}")
        collected += wrong
    assert collected == []
