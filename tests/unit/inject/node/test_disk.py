"""A full disk: the fault is an unlinked file, which disappears with its process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from faultbed.inject.node.actuator import Refused
from faultbed.inject.node.machine.disk import DiskActuator

SIZE = 1 << 20
HOLDER = f"""
import sys
from faultbed.inject.node.machine.disk import DiskActuator
left = [{SIZE}, 0]
DiskActuator._free = lambda self: left.pop(0) if len(left) > 1 else left[0]
disk = DiskActuator(folder=sys.argv[1])
disk.on()
print(disk.read()["taken_bytes"], disk._file, flush=True)
sys.stdin.read()
"""


def filling(folder, monkeypatch):
    """Return an actuator on a disk with one MiB left."""
    left = [SIZE, SIZE, 0]
    monkeypatch.setattr(DiskActuator, "_free", lambda _: left.pop(0) if len(left) > 1 else left[0])
    return DiskActuator(folder=str(folder))


def test_disk_full_uses_an_unnamed_file(tmp_path, monkeypatch):
    disk = filling(tmp_path, monkeypatch)
    assert not disk.prepare()["applied"]
    monkeypatch.undo()
    disk = filling(tmp_path, monkeypatch)
    disk.on()
    reading = disk.read()
    assert reading["applied"]
    assert reading["taken_bytes"] >= SIZE
    assert list(tmp_path.iterdir()) == [], "a name would outlive the process and a reboot"
    disk.off()
    assert not disk.read()["applied"]


def test_disk_full_of_a_file_system_without_unnamed_files_has_no_name_either(tmp_path, monkeypatch):
    disk, real = filling(tmp_path, monkeypatch), os.open

    def refuses(path, flags, *rest, **named):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuses)
    disk.on()
    assert disk.read()["taken_bytes"] >= SIZE
    assert list(tmp_path.iterdir()) == []
    disk.close()


def test_disk_full_ends_with_the_killed_holder(tmp_path):
    """The kernel frees the unlinked file after SIGKILL, so no revert is needed."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        taken, fd = map(int, holder.stdout.readline().split())
        assert taken >= SIZE
        assert "(deleted)" in str(Path(f"/proc/{holder.pid}/fd/{fd}").readlink())
        holder.kill()
        holder.communicate(timeout=10)
    assert list(tmp_path.iterdir()) == []


def test_disk_full_of_a_full_file_system_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(DiskActuator, "_free", lambda _: 0)
    with pytest.raises(Refused, match="already full, and not because of a fault"):
        DiskActuator(folder=str(tmp_path)).prepare()
