"""Serve a file as NVMe over TCP on the front end, by configfs (Linux, drivers/nvme/target/configfs.c)."""

import os
import shlex

from faultbed_found import Found
from faultbed_state import StateError, answer, run

NVMET = "/sys/kernel/config/nvmet"
PORT_ID = 4077  # of ours among the ports of nvmet; others choose small numbers


def main(wanted, check):
    """Entry point of the action on_node."""
    answer(_bring, wanted, check=check)


def _bring(wanted, changes):
    if not wanted["gib"]:
        return
    if not os.path.isdir(NVMET) and not changes.check:
        run(["modprobe", "-a", "nvmet", "nvmet-tcp"])
        if not os.path.isdir(NVMET):
            raise StateError(f"there is no {NVMET}: mount configfs, and load nvmet")
    serving = os.path.islink(f"{NVMET}/ports/{PORT_ID}/subsystems/{wanted['nqn']}")
    Found("storage_target", changes).command(
        f"storage target {wanted['nqn']}",
        have="serving" if serving else "none",
        want="serving",
        do=["sh", "-ec", serve(wanted, NVMET)],
        undo=["sh", "-ec", end(wanted, NVMET)],
    )


def serve(wanted, root):
    """The shell that makes the file, the subsystem and the port, and binds them."""
    subsystem, port, file = _places(wanted, root)
    address = wanted["address"].partition("/")[0]
    return "\n".join(
        [
            f"truncate -s {wanted['gib']}G {file}",
            f"mkdir -p {subsystem}/namespaces/1 {port}/subsystems",
            f"echo 1 > {subsystem}/attr_allow_any_host",
            f"echo -n {file} > {subsystem}/namespaces/1/device_path",
            f"echo 1 > {subsystem}/namespaces/1/enable",
            f"echo tcp > {port}/addr_trtype",
            f"echo ipv4 > {port}/addr_adrfam",
            f"echo {address} > {port}/addr_traddr",
            f"echo {wanted['port']} > {port}/addr_trsvcid",
            f"ln -s {subsystem} {port}/subsystems/",
        ]
    )


def end(wanted, root):
    """The shell that takes all of it away, whatever of it is there; the file too, which was ours."""
    subsystem, port, file = _places(wanted, root)
    return "\n".join(
        [
            f"rm -f {port}/subsystems/{shlex.quote(wanted['nqn'])}",
            f"[ ! -d {port} ] || rmdir {port}",
            f"[ ! -d {subsystem}/namespaces/1 ] || rmdir {subsystem}/namespaces/1",
            f"[ ! -d {subsystem} ] || rmdir {subsystem}",
            f"rm -f {file}",
        ]
    )


def _places(wanted, root):
    subsystem = shlex.quote(f"{root}/subsystems/{wanted['nqn']}")
    return subsystem, f"{root}/ports/{PORT_ID}", shlex.quote(wanted["file"])
