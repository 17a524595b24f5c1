"""Fixtures that several unit tests share."""

from __future__ import annotations

import gc
import os

import pytest
from forked import Forked
from house import HOUSE
from qmp_server import Qemu
from role_programs import changes, load, program, saved_state  # noqa: F401 (fixtures)

from faultbed.inject.leases.channels import LocalChannel
from faultbed.testbed import stopping

gc.disable()  # until all tests are collected: imports create little garbage, and each pass visits all objects


@pytest.fixture(autouse=True)
def no_request_to_stop():
    """Begin and end every test without a request to stop: signals belong to the process, which runs many tests."""
    stopping.reset()
    yield
    stopping.reset()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark tests that need the process that forks commands, because it repeats the imports of the worker."""
    for item in items:
        if "forked" in getattr(item, "fixturenames", ()):  # an experiment file is an item, too
            item.add_marker(pytest.mark.process)


def pytest_collection_finish():
    """Exclude imported and collected objects from garbage collection, which would take a tenth of the time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Put the stand-ins for a rack's tools first in PATH; return the file with their state."""
    import rack_tools

    from faultbed.inject.mechanisms.rack import sonic

    state = rack_tools.install(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sonic, "ACL_POLL_WAS", str(tmp_path / "acl-poll"))
    return state


@pytest.fixture(scope="session")
def labelled():
    """Return synthetic runs with known faults, as (kind, target, measurements)."""
    from labelled_run import campaign

    return tuple(campaign())


@pytest.fixture
def qemu(tmp_path):
    """Return a stand-in for QEMU's monitor."""
    server = Qemu(tmp_path / "qmp")
    yield server
    server.close()


@pytest.fixture
def held(request, qemu, tmp_path):
    """Return a channel to a holder whose guardian treats it as dead after a second of silence (or as parametrised)."""
    channel = LocalChannel("t", tmp_path / "t.revert", watchdog_s=getattr(request, "param", 1.0))
    assert channel.receive(timeout_s=10)["event"] == "ready"
    yield channel
    channel.close()


@pytest.fixture(scope="session")
def forked():
    """Return a starter of commands in processes of their own that are forked after the imports."""
    starter = Forked()
    yield starter
    starter.close()


@pytest.fixture
def faultbed(tmp_path, forked):
    """Return a function that runs the real command in a process of its own, with an empty home."""

    def call(*argv, cwd=HOUSE):
        environment = {**os.environ, "FAULTBED_HOME": str(tmp_path / "home"), "COLUMNS": "160"}
        environment.pop("FAULTBED_LAB", None)
        return forked.faultbed([*map(str, argv)], env=environment, cwd=cwd)

    return call
