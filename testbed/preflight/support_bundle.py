"""Collect the output of a rack's tools in one file for a bug report, without secrets. Changes nothing.

The bundle has the output of preflight's commands, and of those that faults depend on. Addresses, MACs, serial numbers
and UUIDs are replaced consistently by others of the same form, so that parsers can read the bundle. Lines with a
password, a key or a community are removed. Names are those of the inventory. Not yet run on hardware.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from faultbed.testbed.errors import LabError
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.preflight.collect import script
from faultbed.testbed.side_by_side import on_each

if TYPE_CHECKING:
    from faultbed.testbed.lab import Lab

__all__ = ["Scrubber", "commands", "gather", "write"]

_HOST = (
    "uname -srm",
    "cat /etc/os-release",
    "$(command -v mlxconfig || command -v mstconfig || echo mlxconfig) -e query",
    "rdma -j link show",
    "lldpctl -f json",
    "nvidia-smi --query-gpu=index,name,pci.bus_id,driver_version,clocks.max.sm,power.limit --format=csv",
    "dcgmi discovery -l",
    "dkms status",
    "cat /sys/kernel/security/lockdown",
)
_SONIC = (
    "cat /etc/sonic/sonic_version.yml",
    "uname -srm",
    "python3 -V",
    "aclshow -a",
    "sonic-db-cli STATE_DB HGETALL 'SWITCH_CAPABILITY|switch'",
    "sonic-db-cli CONFIG_DB HGETALL 'FEATURE|bgp'",
    "sonic-db-cli CONFIG_DB HGETALL 'FLEX_COUNTER_TABLE|ACL'",
    "docker exec lldp lldpctl -f json",
    "systemctl show bgp -p RestartUSec -p StartLimitBurst -p StartLimitIntervalUSec -p NRestarts",
)
_SECRET = re.compile(r"passw|secret|community|passkey|private.?key|authorized|token|auth_key", re.IGNORECASE)
_SERIAL = re.compile(r"(?i)(serial(?:[ _-]?(?:number|no))?\W{1,40}?)([A-Z0-9][A-Z0-9_-]{3,})")
_UUID = re.compile(r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b")
_MAC = re.compile(r"\b(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}\b")
_IPV4 = re.compile(r"(?<![\d.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\d.])")
_IPV6 = re.compile(
    r"(?<![\w:.])(?:[0-9a-fA-F]{1,4}:){3,7}(?::?[0-9a-fA-F]{1,4})(?![\w:])|(?<![\w:])fe80::[0-9a-fA-F:]+"
)
_KEPT = {"0.0.0.0", "255.255.255.255", "127.0.0.1"}  # noqa: S104 - no address to listen at


class Scrubber:
    """Replace what identifies a lab, in the same way in all outputs of a bundle."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def scrub(self, text: str) -> str:
        """Return the text without secrets; replacements keep the form of the original."""
        lines = [line for line in text.splitlines() if not _SECRET.search(line)]
        scrubbed = "\n".join(lines) + ("\n" if lines else "")
        scrubbed = _SERIAL.sub(lambda hit: hit[1] + self._replacement(hit[2], "SN{:08d}"), scrubbed)
        scrubbed = _UUID.sub(lambda hit: self._replacement(hit[0], "00000000-0000-0000-0000-{:012d}"), scrubbed)
        scrubbed = _MAC.sub(lambda hit: self._mac(hit[0]), scrubbed)
        scrubbed = _IPV6.sub(lambda hit: self._ipv6(hit[0]), scrubbed)
        return _IPV4.sub(lambda hit: hit[0] if hit[0] in _KEPT else self._ipv4(hit[0]), scrubbed)

    def _number(self, name: str) -> int:
        return self._known.setdefault(name, len(self._known) + 1)

    def _replacement(self, name: str, form: str) -> str:
        return form.format(self._number(name.lower()))

    def _mac(self, name: str) -> str:
        number = self._number(name.lower())
        return "02:00:00:" + ":".join(f"{byte:02x}" for byte in number.to_bytes(3, "big"))

    def _ipv6(self, name: str) -> str:
        return f"2001:db8::{self._number(name.lower()):x}"

    def _ipv4(self, name: str) -> str:
        number = self._number(name)  # RFC 2544: 198.18.0.0/15 is reserved for benchmarks
        return f"198.18.{number // 250 % 256}.{number % 250 + 1}"


def commands(inventory: Inventory, machine: str) -> str:
    """Return the shell script that prints everything of a machine; each output follows a line with its command."""
    switch = inventory.topology.switch_by_name.get(machine)
    extra_commands = _HOST if switch is None else _SONIC if switch.nos == "sonic" else ()
    lines = [f"echo '$ {command.replace(chr(39), chr(34))}'; {{ {command}; }} 2>&1" for command in extra_commands]
    return "\n".join(["export LC_ALL=C", *lines, f"( {script(inventory, machine)}\n)"])


def gather(lab: Lab, *, timeout_s: float = 300.0) -> dict[str, str]:
    """Return the output of every machine of a lab, by name; for a machine that does not answer, the reason."""

    def gather_machine(machine: str) -> str:
        try:
            done = lab.node(machine).run(
                ["sh", "-c", commands(lab.inventory_model, machine)], check=False, timeout_s=timeout_s
            )
        except LabError as error:
            return f"{machine} does not answer: {error}\n"
        return done.stdout + done.stderr

    machines = lab.nodes()
    return dict(zip(machines, on_each(machines, gather_machine, timeout_s=2 * timeout_s), strict=True))


def write(path: Path, texts: Mapping[str, str]) -> None:
    """Write a bundle (tar.gz) with one scrubbed file per machine, readable only by its owner."""
    scrubber = Scrubber()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    with tarfile.open(path, "w:gz") as bundle:
        for name, text in texts.items():
            body = scrubber.scrub(text).encode()
            entry = tarfile.TarInfo(f"faultbed-support/{name}.txt")
            entry.size = len(body)
            bundle.addfile(entry, io.BytesIO(body))
