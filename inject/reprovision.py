"""Provision a host of a soft lab again after a reboot, as soon as it answers.

    python -m faultbed.inject.reprovision INVENTORY HOST --print-boot     sync the disk, and print the present boot's id
    python -m faultbed.inject.reprovision INVENTORY HOST --unless BOOT    provision, unless the host is in that boot

After a boot, a soft host has only its identity and the node code on its disk. Provisioning makes its RDMA devices,
addresses, routes, queues and soft GPUs. The holder of a reboot, its guardian or `heal` starts this program. It may run
any number of times, one after the other.
"""

from __future__ import annotations

import argparse
import fcntl
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from faultbed.inject.evidence.reboots import boot_of
from faultbed.inject.leases.channels import revert_dir
from faultbed.testbed import provision
from faultbed.testbed.backends.soft.fleet import BOOT_DEADLINE_S
from faultbed.testbed.errors import CommandFailed, FaultbedError, RevertFailed, Unreachable, UsageError
from faultbed.testbed.inventory.lab_inventory import load
from faultbed.testbed.lab import Lab, open_lab

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["boot_before_reset", "main", "provision_after_reboot", "provision_machines"]

_TRY_EVERY_S = 0.5


def boot_before_reset(lab: Lab, host: str, *, own: str) -> str:
    """Sync the disk of a host, and return the id of its present boot.

    A reset loses data that is not on the disk. Nothing would restore the files that provisioning wrote.

    Raises:
        UsageError: the host is the machine of the controller, whose boot is `own`.
        Unreachable: the host does not answer.
    """
    boot_id = boot_of(lab.node(host)).id
    if boot_id == own:
        raise UsageError(f"{host} is the machine that faultbed itself runs on: never a target")
    lab.node(host).run(["sync"])
    return boot_id


def provision_after_reboot(
    lab: Lab, host: str, *, unless: str, provision_it: Callable[[Lab, Sequence[str]], None]
) -> bool:
    """Wait until a host answers, and provision it unless it is still in the boot `unless`.

    Returns:
        Whether the host was provisioned; False if it is still in the boot `unless`.

    Raises:
        RevertFailed: the host does not answer after its reboot.
        LabError: provisioning failed.
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
                raise RevertFailed(
                    f"{host} did not answer within {deadline_s:.0f} s after its reboot: {error}"
                ) from error
            time.sleep(_TRY_EVERY_S)
    provision_it(lab, [host])
    return True


def provision_machines(lab: Lab, machines: Sequence[str]) -> None:
    """Provision some machines of a soft lab. Callers wait for each other, because they share Ansible's connections.

    Raises:
        LabError: a task failed or a machine did not answer.
    """
    folder = revert_dir(lab)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "rejoin.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        provision.play(provision.site_of(lab), "provision", machines=machines)


def main(argv: list[str] | None = None) -> int:
    """Run the command line. The exit status is 0 if the host is provisioned, or if it still is in the given boot."""
    parser = argparse.ArgumentParser(prog="faultbed.inject.reprovision")
    parser.add_argument("inventory", type=Path)
    parser.add_argument("host")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--print-boot", action="store_true")
    action.add_argument("--unless", metavar="BOOT")
    args = parser.parse_args(argv)
    try:
        with open_lab(load(args.inventory)) as lab:
            if args.print_boot:
                own = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
                sys.stdout.write(f"{boot_before_reset(lab, args.host, own=own)}\n")
            else:
                provision_after_reboot(lab, args.host, unless=args.unless, provision_it=provision_machines)
    except FaultbedError as error:
        sys.stderr.write(f"{args.host}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
