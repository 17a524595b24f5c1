"""Export a file as an NVMe/TCP target on the front end, by configfs (Linux, drivers/nvme/target/configfs.c)."""

import os
import shlex

from faultbed_saved import SavedState
from faultbed_state import StateError, answer, run

NVMET = "/sys/kernel/config/nvmet"
PORT_ID = 4077  # our port of nvmet; other tools number theirs from 1


def main(desired, check):
    """Entry point of the action on_node."""
    answer(_configure, desired, check=check)


def _configure(desired, changes):
    saved = SavedState("storage_target", changes)
    if not desired["gib"]:
        saved.restore()
        return
    is_ours = any(key.endswith(f" {desired['file']}") for key in saved.record["undo"])
    if os.path.exists(desired["file"]) and not is_ours:
        raise StateError(
            f"storage_target_file: {desired['file']} exists and was not made by faultbed, and a teardown would delete "
            "it; name another file"
        )
    if not os.path.isdir(NVMET) and not changes.check:
        run(["modprobe", "-a", "nvmet", "nvmet-tcp"])
        if not os.path.isdir(NVMET):
            raise StateError(f"{NVMET}: no such folder; mount configfs and load the module nvmet")
    saved.command(
        f"storage target {desired['nqn']} {desired['file']}",
        current=current_export(desired, NVMET) if is_ours else "none",
        desired=desired_export(desired),
        do=["sh", "-ec", f"{remove_script(desired, NVMET)}\n{create_script(desired, NVMET)}"],
        undo=["sh", "-ec", f"{remove_script(desired, NVMET)}\nrm -f {shlex.quote(desired['file'])}"],
    )


def desired_export(desired):
    """Return the size and place of the desired export as text: `64 GiB at 10.79.0.1:4420`."""
    return f"{desired['gib']} GiB at {desired['address'].partition('/')[0]}:{desired['port']}"


def current_export(desired, root):
    """Return the size and place of the present export in the form of `desired_export`; "none": there is none."""
    subsystem, port = f"{root}/subsystems/{desired['nqn']}", f"{root}/ports/{PORT_ID}"
    paths = (f"{port}/addr_traddr", f"{port}/addr_trsvcid", f"{subsystem}/namespaces/1/enable")
    if not os.path.islink(f"{port}/subsystems/{desired['nqn']}") or not all(map(os.path.exists, paths)):
        return "none"
    values = []
    for path in paths:
        with open(path, encoding="ascii") as file:
            values.append(file.read().strip())
    address, tcp_port, is_enabled = values
    if is_enabled != "1" or not os.path.exists(desired["file"]):
        return "none"
    return f"{os.path.getsize(desired['file']) / 2**30:g} GiB at {address}:{tcp_port}"


def create_script(desired, root):
    """Return the shell script that creates the file, the subsystem and the port, and links them."""
    subsystem, port, file = _paths(desired, root)
    address = desired["address"].partition("/")[0]
    return "\n".join(
        [
            f"truncate -s {shlex.quote(str(desired['gib']))}G {file}",
            f"mkdir -p {subsystem}/namespaces/1 {port}/subsystems",
            f"echo 1 > {subsystem}/attr_allow_any_host",
            f"echo -n {file} > {subsystem}/namespaces/1/device_path",
            f"echo 1 > {subsystem}/namespaces/1/enable",
            f"echo tcp > {port}/addr_trtype",
            f"echo ipv4 > {port}/addr_adrfam",
            f"echo {shlex.quote(address)} > {port}/addr_traddr",
            f"echo {shlex.quote(str(desired['port']))} > {port}/addr_trsvcid",
            f"ln -s {subsystem} {port}/subsystems/",
        ]
    )


def remove_script(desired, root):
    """Return the shell script that removes our port with every export on it, and our subsystem. The file stays."""
    subsystem, port, _ = _paths(desired, root)
    return "\n".join(
        [
            f"[ ! -d {port} ] || find {port}/subsystems -type l -delete",
            f"[ ! -d {port} ] || rmdir {port}",
            f"[ ! -d {subsystem}/namespaces/1 ] || rmdir {subsystem}/namespaces/1",
            f"[ ! -d {subsystem} ] || rmdir {subsystem}",
        ]
    )


def _paths(desired, root):
    """Return the paths of subsystem, port and exported file, quoted for a shell."""
    subsystem = shlex.quote(f"{root}/subsystems/{desired['nqn']}")
    return subsystem, f"{root}/ports/{PORT_ID}", shlex.quote(desired["file"])
