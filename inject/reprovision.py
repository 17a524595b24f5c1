"""Brings a host that was rebooted back into its lab: waits until it answers, then provisions it.

    python -m inject.reprovision INVENTORY HOST --look            the id of its boot; what it has to write is written
    python -m inject.reprovision INVENTORY HOST --unless BOOT     nothing, when it is still in that boot

A soft host that boots has its identity and the node code on its disk, and nothing else: RDMA devices, addresses,
routes, queues and soft GPUs are made by provisioning. Started by whoever holds, guards or heals a reboot; any number of
times, one after the other.
"""

from __future__ import annotations

import argparse
import fcntl
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from inject.channels import revert_dir
from inject.evidence.reboots import boot_of
from testbed import provision
from testbed.backends.soft.fleet import BOOT_DEADLINE_S
from testbed.errors import CommandFailed, FaultbedError, RevertFailed, Unreachable, UsageError
from testbed.inventory.lab_inventory import load
from testbed.lab import Lab, open_lab

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["look", "main", "provision_machines", "rejoin"]

_TRY_EVERY_S = 0.5


def look(lab: Lab, host: str, *, own: str) -> str:
    """The id of the boot that a host is in, once what it has to write to its disk is written.

    A reset loses what is not; of what provisioning wrote nothing may be lost, for nobody would write it again.

    Raises:
        UsageError: it is the machine that we run on, whose boot is `own`.
        Unreachable: it does not answer.
    """
    found = boot_of(lab.node(host)).id
    if found == own:
        raise UsageError(f"{host} is the machine that faultbed itself runs on: never a target")
    lab.node(host).run(["sync"])
    return found


def rejoin(lab: Lab, host: str, *, unless: str, provision_it: Callable[[Lab, Sequence[str]], None]) -> bool:
    """Wait until a host answers, and provision it unless it is in the boot `unless`.

    Returns:
        Whether it had to be provisioned.

    Raises:
        RevertFailed: it does not come back.
        LabError: it came back, and provisioning failed.
    """
    deadline_s = BOOT_DEADLINE_S[lab.accelerator or "kvm"]
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            if boot_of(lab.node(host)).id == unless:
                return False
            break
        except (Unreachable, CommandFailed) as error:
            lab.forget(host)
            if time.monotonic() > deadline:
                raise RevertFailed(f"{host} is not back after {deadline_s:.0f} s: {error}") from error
            time.sleep(_TRY_EVERY_S)
    provision_it(lab, [host])
    return True


def provision_machines(lab: Lab, machines: Sequence[str]) -> None:
    """Provision some machines of a soft lab; one at a time, for Ansible's connections are shared by all that do.

    Raises:
        LabError: a task failed or a machine did not answer.
    """
    folder = revert_dir(lab)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "rejoin.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        provision.play(provision.site_of(lab), "provision", machines=machines)


def main(argv: list[str] | None = None) -> int:
    """Entry point; the exit status is 0 when the host is in its lab."""
    parser = argparse.ArgumentParser(prog="inject.reprovision")
    parser.add_argument("inventory", type=Path)
    parser.add_argument("host")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--look", action="store_true")
    what.add_argument("--unless", metavar="BOOT")
    asked = parser.parse_args(argv)
    try:
        with open_lab(load(asked.inventory)) as lab:
            if asked.look:
                own = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
                sys.stdout.write(f"{look(lab, asked.host, own=own)}\n")
            else:
                rejoin(lab, asked.host, unless=asked.unless, provision_it=provision_machines)
    except FaultbedError as error:
        sys.stderr.write(f"{asked.host}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
