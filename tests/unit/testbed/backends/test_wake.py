"""A guest whose snapshot was just restored may be too slow for one SSH connection, and answer the next one."""

from types import SimpleNamespace

import pytest

from faultbed.testbed.backends.soft import lifecycle
from faultbed.testbed.errors import Unreachable


def node(*, silent):
    calls = []

    def run(argv, **_):
        calls.append(argv)
        if len(calls) <= silent:
            raise Unreachable("fabric has no working SSH server: no agreement on keys within 15 s")

    return SimpleNamespace(run=run, calls=calls)


def test_guest_that_answers_the_second_connection_is_awake(monkeypatch):
    monkeypatch.setattr(lifecycle.time, "sleep", lambda _: None)
    guest = node(silent=1)
    lifecycle._set_clock(guest)
    assert len(guest.calls) == 2


def test_guest_that_never_answers_is_unreachable(monkeypatch):
    monkeypatch.setattr(lifecycle, "_WAKE_S", 0.0)
    with pytest.raises(Unreachable, match="no agreement on keys"):
        lifecycle._set_clock(node(silent=1000))
