"""Choose the accelerator for QEMU on this machine: KVM if it works, TCG otherwise.

A `/dev/kvm` that opens proves nothing: on nested or restricted machines a stock guest can hang under it forever. The
guest kernel is therefore booted once under KVM with deadlines for the first byte that it prints, in wall-clock time and
in CPU time, and for the word that its init prints before it stops (`guest/init`).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from faultbed.testbed.backends.soft import vm_process
from faultbed.testbed.backends.soft.image import Image
from faultbed.testbed.directories import cache_dir
from faultbed.testbed.errors import UsageError

__all__ = ["Accelerator", "choose", "probe_kvm", "remembered"]

Accelerator = Literal["kvm", "tcg"]

PROBE_DEADLINE_S = 8.0
"""A working KVM boots the probe in about one second, nested KVM in three, and emulation in eight."""
FIRST_BYTE_S = 4.0
"""Even an emulated kernel prints its version within two seconds; one that hangs under KVM prints nothing."""
FIRST_BYTE_CPU_S = 1.0
_KILLED_S = 10.0
"""CPU time within which a working kernel prints its first byte. CPU time, because a hung kernel spins, and wall-clock
time depends on how busy the machine is."""

_WORD = b"faultbed-probe-ok"


def choose(image: Image, progress: Callable[[str], None]) -> Accelerator:
    """Return the accelerator for this machine; `FAULTBED_ACCEL=kvm|tcg` overrides the probe.

    The result is kept until the next reboot, or another image.
    """
    if chosen := os.environ.get("FAULTBED_ACCEL"):
        if chosen not in ("kvm", "tcg"):
            raise UsageError(f'FAULTBED_ACCEL="{chosen}": set kvm or tcg, or unset it for a probe of KVM')
        return "kvm" if chosen == "kvm" else "tcg"
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "tcg"
    if (known := remembered(image)) is not None:
        return "kvm" if known else "tcg"
    progress("KVM: probing with a real boot")
    started_s = time.monotonic()
    works = probe_kvm(image)
    _memory().parent.mkdir(parents=True, exist_ok=True)
    _memory().write_text(json.dumps({"key": _key(image), "works": works}))
    took_s = time.monotonic() - started_s
    progress("KVM: works" if works else f"KVM: a guest hung or ended within {took_s:.0f} s; using TCG (emulation)")
    return "kvm" if works else "tcg"


def remembered(image: Image | None) -> bool | None:
    """Return the result of the last probe of this image since the last reboot; None if there was none."""
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(_memory().read_text())
        if image is not None and known["key"] == _key(image):
            return bool(known["works"])
    return None


def _memory() -> Path:
    return cache_dir() / "kvm-probe.json"


def _key(image: Image) -> list[str]:
    return [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), image.digest]


def probe_kvm(
    image: Image,
    *,
    first_byte_s: float = FIRST_BYTE_S,
    first_byte_cpu_s: float = FIRST_BYTE_CPU_S,
    deadline_s: float = PROBE_DEADLINE_S,
) -> bool:
    """Return whether the guest kernel prints something, and then reaches its first process, under KVM in time."""
    argv = [
        *("qemu-system-x86_64", "-accel", "kvm", "-cpu", "host", "-m", "256", "-smp", "1"),
        *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-machine", "pc"),
        *("-kernel", str(image.kernel), "-initrd", str(image.initrd)),
        *("-append", "console=ttyS0 earlyprintk=serial,ttyS0 loglevel=6 panic=-1 faultbed.probe"),
    ]
    with tempfile.TemporaryDirectory(prefix="faultbed-probe-") as folder:
        serial = Path(folder) / "serial"
        child = subprocess.Popen(
            [*argv, "-serial", f"file:{serial}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        started_s = time.monotonic()
        try:
            while child.poll() is None and _WORD not in (printed := _content(serial)):
                if time.monotonic() - started_s > (deadline_s if printed else first_byte_s):
                    return False
                if not printed and vm_process.cpu_s(child.pid) > first_byte_cpu_s:
                    return False
                time.sleep(0.1)
            return _WORD in _content(serial)
        finally:
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=_KILLED_S)


def _content(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b""
