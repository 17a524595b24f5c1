"""The probe of KVM, with a program in QEMU's place that prints what a guest kernel would, or hangs."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from faultbed.testbed.backends.soft import accel

KERNEL = "[    0.000000] Linux version 6.12.0"


@pytest.fixture
def image(tmp_path):
    return SimpleNamespace(kernel=tmp_path / "vmlinux", initrd=tmp_path / "initrd", digest="1234")


@pytest.fixture
def qemu(tmp_path, monkeypatch):
    """Return a function that makes `qemu-system-x86_64` a script; `$serial` is the file of the serial console."""

    def made(script):
        program = tmp_path / "bin" / "qemu-system-x86_64"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\nfor word; do serial="${{word#file:}}"; done\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")

    return made


@pytest.mark.parametrize(
    ("script", "works"),
    [
        (f'echo "{KERNEL}" >$serial; echo faultbed-probe-ok >>$serial; exec sleep 60', True),
        ("echo faultbed-probe-ok >$serial", True),
        ("exec sleep 60", False),
        (f'echo "{KERNEL}" >$serial; exec sleep 60', False),
        ("exit 1", False),
    ],
    ids=["kernel and its init", "powered off", "hangs at once", "hangs later", "no KVM"],
)
def test_kvm_works_only_if_the_guest_reaches_its_init(image, qemu, script, works):
    qemu(script)
    patience = {"first_byte_s": 20.0, "deadline_s": 30.0} if works else {"first_byte_s": 0.5, "deadline_s": 1.5}
    assert accel.probe_kvm(image, **patience) is works


def test_kernel_that_prints_has_longer_than_one_that_is_silent(image, qemu):
    """A guest that hangs under KVM prints nothing: the probe of it used to take eight seconds."""
    qemu(f'echo "{KERNEL}" >$serial; sleep 3; echo faultbed-probe-ok >>$serial; exec sleep 60')
    assert accel.probe_kvm(image, first_byte_s=2.0, deadline_s=40.0)
    qemu("exec sleep 60")
    started_s = time.monotonic()
    assert not accel.probe_kvm(image, first_byte_s=0.5, deadline_s=60.0)
    assert time.monotonic() - started_s < 30


def test_silent_kernel_that_spins_is_given_up_by_its_cpu_time(image, qemu):
    """One that waits for a busy machine is not: it has got no CPU time yet."""
    qemu("while :; do :; done")
    assert not accel.probe_kvm(image, first_byte_s=600.0, first_byte_cpu_s=0.2, deadline_s=600.0)
    qemu(f'sleep 1; echo "{KERNEL}" >$serial; echo faultbed-probe-ok >>$serial; exec sleep 60')
    assert accel.probe_kvm(image, first_byte_s=60.0, first_byte_cpu_s=0.2, deadline_s=60.0)
