"""SSH access to the VMs of one lab: keys, user, and the addresses that Ansible needs.

The controller has one key and each machine a host key, all generated before the first boot. Host keys are therefore
pinned from the first connection on: there is no "trust on first use".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from faultbed.testbed.inventory.lab_inventory import Inventory

__all__ = ["USER", "KeyPair", "ansible_addresses", "generate", "write_ansible_addresses", "write_private"]

USER = "root"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """An Ed25519 key pair: `private` in OpenSSH's format, `public` as one line of an authorized_keys file."""

    private: str
    public: str


def generate() -> KeyPair:
    """Generate a key pair."""
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return KeyPair(private=private.decode(), public=public.decode())


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, at no moment readable by other users."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(text)


def ansible_addresses(folder: Path) -> Path:
    """Return the path of a running lab's second inventory: the addresses of its machines."""
    return folder / "runtime.yml"


def write_ansible_addresses(inventory: Inventory, folder: Path, ports: Mapping[str, int]) -> None:
    """Write `ansible_addresses`; the file contains paths of key files, never keys."""
    options = (
        f"-o StrictHostKeyChecking=yes -o UserKnownHostsFile={folder / 'known_hosts'} -o GlobalKnownHostsFile=/dev/null"
    )
    hosts = {
        name: {
            "ansible_host": "127.0.0.1",
            "ansible_port": port,
            "ansible_user": USER,
            "ansible_ssh_private_key_file": str(folder / "id_ed25519"),
            "ansible_ssh_common_args": f"{options} -o IdentitiesOnly=yes",
            "ansible_python_interpreter": "/usr/bin/python3",
        }
        for name, port in ports.items()
    }
    head = f"# Addresses of the machines of {inventory.name}. Written by `faultbed up`, removed by `faultbed down`.\n"
    ansible_addresses(folder).write_text(head + yaml.safe_dump({"all": {"hosts": hosts}}))
