"""Commands that receive Ctrl-C or SIGTERM while something hangs: a line within a second, and an end by the deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from faultbed.testbed import shipped

pytestmark = pytest.mark.process

# Deadlines that are a tenth of the real ones: the process under test runs the same code. It inherits no ignored SIGHUP
# from tests that run under `nohup`.
_SCALED = """
import signal, sys, threading, time, click
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from faultbed.testbed import stopping
from faultbed.harness.cli.ending import end_with
stopping.FIRST_S, stopping.SECOND_S, stopping._MARGIN_S = 4.0, 1.0, 0.2
stopping.WORKLOAD_S, stopping.COMPARE_S, stopping._AT_ONCE_S = 1.0, 2.0, 0.4
stopping.reset()

@click.command()
def hang():
    stopping.report_activity("waiting for host3")
{body}

end_with(hang, "faultbed")
"""
HANGS = """
    while True:
        try:
            print("begun", flush=True)
            while True:
                threading.Event().wait(0.1)
        except KeyboardInterrupt:
            continue
"""
WAITS = """
    try:
        print("begun", flush=True)
        while True:
            time.sleep(0.05)
    finally:
        print("answered" if stopping.Deadline(600.0).wait(threading.Event()) else "gave up", flush=True)
"""
OWES = (
    """
    stopping.owe(hang, lambda reasons: "link.flap on rtsw1:ctsw1 reverts when its lease of 10 s expires")
"""
    + HANGS
)


def _start(body: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", _SCALED.format(body=body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(shipped.import_root())},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "begun\n"
    return child


def _signalled(body: str, *numbers: signal.Signals) -> tuple[int, str, str, float]:
    child = _start(body)
    for number in numbers:
        last_s = time.monotonic()
        child.send_signal(number)
        time.sleep(0.5)
    out, err = child.communicate(timeout=60)
    return child.returncode, out, err, time.monotonic() - last_s


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_hanging_command_reports_its_activity_and_ends_by_the_deadline(number):
    code, _, err, _ = _signalled(HANGS, number)
    assert f"{number.name} during: waiting for host3" in err
    assert "ended by force" in err
    assert "faultbed status" in err
    assert code == 3


def test_line_comes_before_the_end():
    child = _start(HANGS)
    child.send_signal(signal.SIGINT)
    assert child.stderr is not None
    assert "SIGINT during: waiting for host3" in child.stderr.readline()
    assert child.poll() is None
    child.kill()
    child.communicate(timeout=60)


def test_second_signal_ends_earlier():
    _, _, err, first_s = _signalled(HANGS, signal.SIGINT)
    code, _, err, second_s = _signalled(HANGS, signal.SIGINT, signal.SIGINT)
    assert "SIGINT again" in err
    assert code == 3
    assert second_s < first_s


def test_faults_that_could_not_be_reached_are_named_and_the_lab_is_dirty():
    code, _, err, _ = _signalled(OWES, signal.SIGINT)
    assert "link.flap on rtsw1:ctsw1 reverts when its lease of 10 s expires" in err
    assert code == 5


def test_wait_of_the_cleanup_ends_by_itself():
    """The stage of the workload is over long before the process would be ended by force."""
    code, out, err, _ = _signalled(WAITS, signal.SIGINT)
    assert out == "gave up\n"
    assert "by force" not in err
    assert code == 3


def test_command_that_ends_at_once_prints_no_more_than_its_end():
    code, _, err, _ = _signalled("    print('begun', flush=True)\n    time.sleep(600)\n", signal.SIGINT)
    assert err.strip().splitlines() == ["faultbed: interrupted; `faultbed status` shows the state of the lab"]
    assert code == 3
