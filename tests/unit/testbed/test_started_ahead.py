"""Node-side modules that are started before they are needed, by a lab whose machines are channels in memory."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from faultbed.testbed.errors import Unreachable
from faultbed.testbed.lab import Lab


class Channel:
    def __init__(self, name, argv):
        self.name, self.argv, self.is_open = name, argv, True

    def close(self):
        self.is_open = False


class Machines(Lab):
    """Opens a channel for each program; `silent` machines refuse, once for each entry."""

    def __init__(self, *silent):
        self._started_ahead, self._lock = {}, threading.Lock()
        self.silent, self.channels = list(silent), []

    def _fork(self, *_):
        return None

    def ensure_code(self, name):
        if name in self.silent:
            self.silent.remove(name)
            raise Unreachable(f"{name} does not answer")

    def python(self, module):
        return ["python3", "-m", module]

    def node(self, name):
        def open_(argv):
            self.channels.append(Channel(name, argv))
            return self.channels[-1]

        return SimpleNamespace(open=open_)

    @property
    def left_open(self):
        return sorted(channel.name for channel in self.channels if channel.is_open)


def test_module_that_was_started_ahead_is_opened_once():
    lab = Machines()
    with lab.started_ahead(["host1", "host2", "host1"], "engine"):
        first, second, other = (lab.open_module("host1", word) for word in ("engine", "engine", "watcher"))
        third = lab.open_module("host2", "engine")
        assert len(lab.channels) == 4
    assert first is not second
    assert [one.argv[-1] for one in (first, second, other, third)] == ["engine", "engine", "watcher", "engine"]
    assert lab.left_open == ["host1", "host1", "host1", "host2"], "the caller closes what it has opened"


def test_module_with_arguments_is_started_anew():
    lab = Machines()
    with lab.started_ahead(["host1"], "engine"):
        assert lab.open_module("host1", "engine", "--keep", "3").argv[-2:] == ["--keep", "3"]
    assert lab.left_open == ["host1"]


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_modules_that_nobody_opened_are_closed(error):
    lab = Machines()

    def block():
        with lab.started_ahead(["host1", "host2"], "engine"):
            if error is not None:
                raise error

    if error is None:
        block()
    else:
        with pytest.raises(error):
            block()
    assert (len(lab.channels), lab.left_open) == (2, [])
    lab.open_module("host1", "engine")
    assert lab.left_open == ["host1"], "nothing of the block is used after it"


def test_module_that_could_not_be_started_ahead_is_started_when_it_is_needed():
    lab = Machines("host1", "host2", "host2")
    with lab.started_ahead(["host1", "host2"], "engine"):
        assert lab.open_module("host1", "engine").is_open
        with pytest.raises(Unreachable, match="host2 does not answer"):
            lab.open_module("host2", "engine")
