"""Processes that end in the middle of a fault, by Ctrl-C twice, pytest-timeout or SIGKILL, leave nothing behind.

Real processes: the command line, pytest with our plugin and pytest-timeout, the holder and its guardian. Only QEMU and
the lab's machines are stand-ins.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from house import HOUSE, SUPPORT
from waiting import until

from faultbed.inject.injector import Injector
from faultbed.inject.journal import Journal
from faultbed.testbed.errors import RevertFailed
from faultbed.testbed.tenancy import dirty

START_S = 60.0
TTL_S = 10.0

CONFTEST = """
import pathlib, pytest
from local_lab import lab_at

@pytest.fixture
def lab():
    return lab_at(pathlib.Path(__file__).parent)

@pytest.fixture
def armed(inject):
    prepared = inject("link.flap", "host1:rxe0")
    assert prepared.arm().ok
    return prepared
"""
TEST = """
import threading
def test_it(armed):
    threading.Event().wait(60)
"""


def started(tmp_path, *words, **env):
    """Start a process of faultbed in its own process group, as in a shell's foreground."""
    path = os.pathsep.join((str(HOUSE), str(SUPPORT)))
    return subprocess.Popen(
        [sys.executable, *words], cwd=tmp_path, start_new_session=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, env={**os.environ, "PYTHONPATH": path, **env},
    )  # fmt: skip


def is_restored(qemu, tmp_path):
    return qemu.links[-1] is True and not list((tmp_path / "faults").glob("*.revert"))


@pytest.mark.process
def test_second_ctrl_c_does_not_skip_the_revert(qemu, tmp_path):
    """The first one begins to clear; the second interrupts that and leaves the revert to the target.
    The end is then unseen: the lab is DIRTY until it is compared.
    """
    with started(tmp_path, str(SUPPORT / "local_lab.py"), str(tmp_path)) as process:
        until(lambda: False in qemu.links, within_s=START_S)
        until((tmp_path / "journal").exists, within_s=START_S)
        qemu.late_s = 1.0
        os.killpg(process.pid, signal.SIGINT)
        assert qemu.is_asked.wait(START_S)
        os.killpg(process.pid, signal.SIGINT)
        output = process.communicate(timeout=START_S)[0]
    assert process.returncode != 0, output
    until(lambda: is_restored(qemu, tmp_path), within_s=TTL_S + 2)
    assert "link.flap on host1:rxe0: its end was not observed" in dirty.reasons(tmp_path)[0]
    assert "heal" in output


@pytest.mark.process
@pytest.mark.parametrize("mute_s", [0.0, 1.0])
def test_one_ctrl_c_clears_without_a_dirty_mark(qemu, tmp_path, mute_s):
    """This also holds while the holder still owes a reply, which used to be taken for the reply to the next request."""
    qemu.mute_s = mute_s
    with started(tmp_path, str(SUPPORT / "local_lab.py"), str(tmp_path)) as process:
        until(lambda: False in qemu.links, within_s=START_S)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=START_S)
    assert is_restored(qemu, tmp_path)
    assert not dirty.is_marked(tmp_path)


def test_clear_all_clears_the_other_faults_and_names_the_one_that_stays(tmp_path):
    """Ctrl-C comes during two faults, one of which cannot be reverted."""
    cleared = []

    def stands_for(target, *, ok):
        receipt = SimpleNamespace(kind="link.flap", target=target, cleared=SimpleNamespace(ok=ok, error="no QEMU"))
        planned = SimpleNamespace(place=SimpleNamespace(node=target.partition(":")[0]))
        return SimpleNamespace(clear=lambda: cleared.append(target) or receipt, planned=planned)

    with Journal(tmp_path / "journal") as journal:
        injector = Injector(SimpleNamespace(state_dir=tmp_path), journal)
        injector._open += [stands_for("host1:rxe0", ok=True), stands_for("host2:rxe0", ok=False)]
        with pytest.raises(RevertFailed, match="host2:rxe0 is not cleared: no QEMU"):
            injector.clear_all()
    assert sorted(cleared) == ["host1:rxe0", "host2:rxe0"]  # side by side: a place that hangs delays no other


@pytest.mark.process
@pytest.mark.parametrize("how", ["signal", "thread", "SIGKILL"])
def test_test_killed_during_a_fault_leaves_nothing(qemu, tmp_path, how):
    """pytest-timeout raises in the test (signal) or ends the process (thread); a worker may be killed."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TEST)
    method = "thread" if how == "SIGKILL" else how
    (tmp_path / "pytest.ini").write_text(f"[pytest]\ntimeout_func_only = true\ntimeout_method = {method}\n")
    seconds = 60 if how == "SIGKILL" else 1
    with started(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--timeout={seconds}", ".") as process:
        until(lambda: False in qemu.links, within_s=START_S)
        if how == "SIGKILL":
            os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate(timeout=START_S)[0]
    assert process.returncode != 0
    until(lambda: is_restored(qemu, tmp_path), within_s=TTL_S + 2)
    assert how == "SIGKILL" or "Timeout" in output, output


HOLDS = """
import pathlib, threading
from faultbed.harness.pytest_plugin.session_lab import acquire_lease
def test_it(request):
    acquire_lease(request.config)
    pathlib.Path("held").touch()
    threading.Event().wait(60)
"""


@pytest.mark.process
def test_xdist_one_worker_has_the_lab_and_the_other_learns_which(tmp_path):
    """pytest-xdist starts one session with one FAULTBED_HOME and a process per worker."""
    (tmp_path / "test_it.py").write_text(HOLDS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--lab", str(HOUSE / "inventory/soft.yml"), ".")
    shared = {"FAULTBED_HOME": str(tmp_path / "home"), "PYTEST_XDIST_TESTRUNUID": "one"}
    with started(tmp_path, *words, **shared, PYTEST_XDIST_WORKER="gw0") as first:
        try:
            until((tmp_path / "held").exists, within_s=START_S)
            with started(tmp_path, *words, **shared, PYTEST_XDIST_WORKER="gw1") as second:
                output = second.communicate(timeout=START_S)[0]
        finally:
            os.killpg(first.pid, signal.SIGKILL)
        first.communicate(timeout=START_S)
    assert second.returncode == 1, output
    assert "Reserved" in output
    assert f"(process {first.pid})" in output
