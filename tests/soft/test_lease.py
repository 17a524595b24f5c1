"""Whoever dies, the target restores itself within its lease: controller killed, holder killed, holder stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faults import KINDS, case, until

from inject.injector import Injector
from inject.journal import Journal

pytestmark = pytest.mark.soft

TTL_S = 10.0

_CONTROLLER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from faults import case
from inject.injector import Injector
from inject.journal import Journal
from testbed.lab import open_lab
with open_lab(Path(sys.argv[1])) as lab, Journal(Path(sys.argv[4])) as journal:
    with Injector(lab, journal, ttl_s=float(sys.argv[5])) as injector:
        assert injector.prepare(case(lab, sys.argv[2], for_s=300.0).planned).arm().ok
        print("armed", flush=True)
        time.sleep(300)
"""


@pytest.mark.parametrize("name", KINDS)
def test_a_killed_controller_leaves_nothing(lab, tmp_path, name):
    """SIGKILL while the fault is on: restored within TTL + 2 s; that the lab looks as before is the fixture's check."""
    fault = case(lab, name, for_s=300.0)
    controller = subprocess.Popen(
        [
            sys.executable, "-c", _CONTROLLER, str(lab.inventory), name, str(Path(__file__).parent),
            str(tmp_path / "journal.jsonl"), str(TTL_S),
        ],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    with controller:
        assert controller.stdout.readline() == b"armed\n"
        assert not fault.is_restored(lab)
        os.kill(controller.pid, signal.SIGKILL)
        print(f"{name}: restored {until(lambda: fault.is_restored(lab), within_s=TTL_S + 2):.1f} s after SIGKILL")


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(name, how, marks=[] if (name, how) == ("throttle", "KILL") else pytest.mark.slow)
        for name in KINDS
        for how in ("KILL", "STOP")
    ],
)
def test_a_holder_that_cannot_revert_is_reverted_for(lab, tmp_path, name, how):
    """SIGKILL and SIGSTOP of the holder: PID 1, the kernel or the guardian restores, and the receipt says by whom."""
    fault = case(lab, name, for_s=300.0)
    planned = fault.planned
    with Journal(tmp_path / "j") as journal, Injector(lab, journal, ttl_s=TTL_S) as injector:
        prepared = injector.prepare(planned)
        assert prepared.arm().ok
        if planned.place.local:
            guardian = prepared.guardian_pid
            children = Path(f"/proc/{guardian}/task/{guardian}/children").read_text().split()
            os.kill(int(children[0]), getattr(signal, f"SIG{how}"))
        else:
            node = lab.carrier(planned.place.node)
            node.run(["systemctl", "kill", f"--signal={how}", "--kill-whom=main", prepared.unit])
        print(f"{name}: restored {until(lambda: fault.is_restored(lab), within_s=TTL_S + 2):.1f} s after SIG{how}")
        receipt = prepared.clear()
    assert receipt.cleared.ok, receipt.cleared.error
    assert receipt.cleared.by == "lease"
