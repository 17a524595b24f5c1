"""The list of systemd's units against bytes that systemd 252 has sent: two of its signals, and then its answer.

A lab test compares the list with that of systemctl (`tests/soft/test_lab.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from systemd_server import Systemd

from faultbed.testbed.node import systemd_units

DATA = Path(__file__).resolve().parents[3] / "data" / "systemd"
OK = b"OK 5dfcb79d6ca34f3ab42e247b5fe6c8ab\r\n"
UNITS = (DATA / "units.bin").read_bytes()
LISTED = [
    ("faultbed-exited.service", "active", "exited"),
    ("faultbed-fail.service", "failed", "failed"),
    ("faultbed-missing.service", "inactive", "dead"),  # another unit wants it, and there is none
    ("faultbed-timed.service", "inactive", "dead"),
    ("faultbed-timed.timer", "active", "waiting"),
    ("faultbed-wants.service", "active", "running"),
]


@pytest.fixture
def systemd(tmp_path, monkeypatch):
    """Return a function that starts a server in systemd's place."""
    monkeypatch.setattr(systemd_units, "SOCKET", str(tmp_path / "private"))
    return lambda *answers: Systemd(tmp_path / "private", answers)


def test_list_units_has_failed_and_unloaded_units_and_skips_signals(systemd):
    with systemd(OK, UNITS) as server:
        assert sorted(systemd_units.list_units("faultbed-*", within_s=5.0)) == LISTED
    name, request = server.requests
    assert name.startswith(b"\0AUTH EXTERNAL ")
    assert b"ListUnitsByPatterns" in request


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ((OK, (DATA / "refusal.bin").read_bytes()), "it refused: org.freedesktop.DBus.Error.UnknownMethod"),
        ((b"REJECTED EXTERNAL\r\n",), "it rejected user"),
        ((OK, UNITS[:-1]), "it closed the connection"),
        ((OK, b"HTTP/1.1 400 Bad Request"), "a message begins with b'H'"),
    ],
)
def test_list_units_without_an_answer_is_an_error_and_never_an_empty_list(systemd, answers, words):
    with systemd(*answers), pytest.raises(OSError, match="private: ") as error:
        systemd_units.list_units("faultbed-*", within_s=5.0)
    assert words in str(error.value)


def test_list_units_without_a_socket_is_an_error(systemd):
    with pytest.raises(OSError, match=r"private: .*No such file"):
        systemd_units.list_units("faultbed-*", within_s=5.0)


@given(at=st.integers(0, len(UNITS) - 1), byte=st.integers(0, 255))
def test_list_units_from_damaged_bytes_is_a_list_or_an_error(at, byte, tmp_path_factory):
    """No damage makes the watcher end, or wait for longer than it was given."""
    path = tmp_path_factory.mktemp("s") / "private"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(systemd_units, "SOCKET", str(path))
        with Systemd(path, (OK, UNITS[:at] + bytes([byte]) + UNITS[at + 1 :])):
            try:
                units = systemd_units.list_units("faultbed-*", within_s=5.0)
            except OSError as error:
                assert str(path) in str(error)
            else:
                assert all(len(unit) == 3 for unit in units)
