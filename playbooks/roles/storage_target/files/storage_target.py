"""Serve a file as NVMe over TCP on the front end, by configfs (Linux, drivers/nvme/target/configfs.c)."""

import os
import shlex

from faultbed_saved import SavedState
from faultbed_state import StateError, answer, run

NVMET = "/sys/kernel/config/nvmet"
PORT_ID = 4077  # of ours among the ports of nvmet; others choose small numbers


def main(wanted, check):
    """Entry point of the action on_node."""
    answer(_bring, wanted, check=check)


def _bring(wanted, changes):
    saved = SavedState("storage_target", changes)
    if not wanted["gib"]:
        saved.restore()
        return
    ours = any(key.endswith(f" {wanted['file']}") for key in saved.record["undo"])
    if os.path.exists(wanted["file"]) and not ours:
        raise StateError(f"{wanted['file']} is there and not ours, and a teardown would delete it: name another file")
    if not os.path.isdir(NVMET) and not changes.check:
        run(["modprobe", "-a", "nvmet", "nvmet-tcp"])
        if not os.path.isdir(NVMET):
            raise StateError(f"there is no {NVMET}: mount configfs, and load nvmet")
    saved.command(
        f"storage target {wanted['nqn']} {wanted['file']}",
        have=served(wanted, NVMET) if ours else "none",
        want=told(wanted),
        do=["sh", "-ec", f"{end(wanted, NVMET)}\n{serve(wanted, NVMET)}"],
        undo=["sh", "-ec", f"{end(wanted, NVMET)}\nrm -f {shlex.quote(wanted['file'])}"],
    )


def told(wanted):
    """What is served, and where, in words."""
    return f"{wanted['gib']} GiB at {wanted['address'].partition('/')[0]}:{wanted['port']}"


def served(wanted, root):
    """What is served now, in the same words."""
    subsystem, port = f"{root}/subsystems/{wanted['nqn']}", f"{root}/ports/{PORT_ID}"
    places = (f"{port}/addr_traddr", f"{port}/addr_trsvcid", f"{subsystem}/namespaces/1/enable")
    if not os.path.islink(f"{port}/subsystems/{wanted['nqn']}") or not all(map(os.path.exists, places)):
        return "none"
    said = []
    for place in places:
        with open(place, encoding="ascii") as file:
            said.append(file.read().strip())
    if said.pop() != "1" or not os.path.exists(wanted["file"]):
        return "none"
    return f"{os.path.getsize(wanted['file']) / 2**30:g} GiB at {said[0]}:{said[1]}"


def serve(wanted, root):
    """The shell that makes the file, the subsystem and the port, and binds them."""
    subsystem, port, file = _places(wanted, root)
    address = wanted["address"].partition("/")[0]
    return "\n".join(
        [
            f"truncate -s {shlex.quote(str(wanted['gib']))}G {file}",
            f"mkdir -p {subsystem}/namespaces/1 {port}/subsystems",
            f"echo 1 > {subsystem}/attr_allow_any_host",
            f"echo -n {file} > {subsystem}/namespaces/1/device_path",
            f"echo 1 > {subsystem}/namespaces/1/enable",
            f"echo tcp > {port}/addr_trtype",
            f"echo ipv4 > {port}/addr_adrfam",
            f"echo {shlex.quote(address)} > {port}/addr_traddr",
            f"echo {shlex.quote(str(wanted['port']))} > {port}/addr_trsvcid",
            f"ln -s {subsystem} {port}/subsystems/",
        ]
    )


def end(wanted, root):
    """The shell that ends what our port serves, under whatever name, and our subsystem; the file stays."""
    subsystem, port, _ = _places(wanted, root)
    return "\n".join(
        [
            f"[ ! -d {port} ] || find {port}/subsystems -type l -delete",
            f"[ ! -d {port} ] || rmdir {port}",
            f"[ ! -d {subsystem}/namespaces/1 ] || rmdir {subsystem}/namespaces/1",
            f"[ ! -d {subsystem} ] || rmdir {subsystem}",
        ]
    )


def _places(wanted, root):
    subsystem = shlex.quote(f"{root}/subsystems/{wanted['nqn']}")
    return subsystem, f"{root}/ports/{PORT_ID}", shlex.quote(wanted["file"])
