"""Interfaces of the management connection, which no fault may touch.

An interface is a management interface if any of these is true:

    name            it is lo, or mgmt0, the name that provisioning gives
    default route   a default route of the main table uses it (IPv4 or IPv6)
    SSH             it has the local address of an open SSH connection of any user. The port is 22, or one that
                    $SSH_CONNECTION of any process names: a holder is started by systemd and does not have this variable
    VRF             it is a VRF called mgmt, or belongs to one. SONiC's management routes are in that VRF's table
    below           it carries a management interface: a member of a bond or a bridge, or the interface under a VLAN

A PCIe device carries management if one of its interfaces does, or an interface of one of its virtual functions. This
cannot detect a BMC that shares the port of an RNIC (NC-SI), nor an SSH session to an address of lo that arrives by
another interface.

Formats: proc(5), ssh(1), linux/if_addr.h, Linux' Documentation/ABI/testing/sysfs-class-net, the kernel's
net/ipv6/route.c (rt6_info_route: /proc/net/ipv6_route) and net/core/dev.c (netdev_adjacent_sysfs_add: `lower_NAME`).
"""

# Importing pathlib costs start-up time.
# ruff: noqa: PTH114, PTH115, PTH118, PTH119, PTH123, PTH208
from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterator

from faultbed.testbed.node.netlink import Netlink, attributes

__all__ = ["below", "management_interfaces", "of_vrf", "on_device", "ssh_addresses"]

_RTM_GETADDR, _RTM_NEWADDR = 22, 20
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_INFO = struct.Struct("=BBBBI")
_ESTABLISHED, _SSH_PORT = "01", 22
_MAPPED = bytes(10) + b"\xff\xff"
_VRF = "mgmt"
_SYSFS = "/sys/class/net"


def management_interfaces() -> set[str]:
    """Return the names of the management interfaces in the network namespace of this process."""
    names = {"lo", "mgmt0"} | of_vrf()
    for line in _lines("/proc/net/route"):
        words = line.split()
        if words[1] == "00000000":
            names.add(words[0])
    names |= {words[9] for words in _words("/proc/net/ipv6_route") if words[:2] == ["0" * 32, "00"]}
    ssh = ssh_addresses()
    if ssh:
        names |= {name for name, address in _addresses() if address in ssh}
    return below(names)


def below(names: set[str], sysfs: str = _SYSFS) -> set[str]:
    """Return these interfaces and all interfaces that carry them."""
    closure, left = set(), list(names)
    while left:
        name = left.pop()
        if name not in closure:
            closure.add(name)
            left += [
                entry.removeprefix("lower_") for entry in _entries(f"{sysfs}/{name}") if entry.startswith("lower_")
            ]
    return closure


def on_device(pcie: str, sysfs: str = "/sys/bus/pci/devices") -> set[str]:
    """Return the interfaces of a PCIe device and of its virtual functions."""
    device = f"{sysfs}/{pcie}"
    functions = [device, *(f"{device}/{entry}" for entry in _entries(device) if entry.startswith("virtfn"))]
    return {name for function in functions for name in _entries(f"{function}/net")}


def of_vrf(sysfs: str = _SYSFS) -> set[str]:
    """Return the VRF called mgmt and the interfaces that belong to it."""
    members = set()
    for name in os.listdir(sysfs):
        master = os.path.join(sysfs, name, "master")
        if name == _VRF or (os.path.islink(master) and os.path.basename(os.readlink(master)) == _VRF):
            members.add(name)
    return members


def ssh_addresses() -> set[bytes]:
    """Return the local addresses, as bytes, of open SSH connections and of this process's own $SSH_CONNECTION."""
    addresses, ports = set(), {_SSH_PORT}
    for is_own, words in _connections():
        ports.add(int(words[3]))
        if is_own:
            address = words[2].partition("%")[0]
            addresses.add(_plain(socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)))
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in _lines(table):
            local, state = line.split()[1], line.split()[3]
            address, _, port = local.partition(":")
            if state == _ESTABLISHED and int(port, 16) in ports:
                addresses.add(_plain(_of_hex(address)))
    return addresses


def _connections() -> Iterator[tuple[bool, list[str]]]:
    """Yield $SSH_CONNECTION of every process, in words; the flag is true for this process's own."""
    variables = [(True, os.environ.get("SSH_CONNECTION", ""))]
    for number in os.listdir("/proc"):
        if number.isdigit():
            for line in _read(f"/proc/{number}/environ").split("\0"):
                name, _, value = line.partition("=")
                if name == "SSH_CONNECTION":
                    variables.append((False, value))
    for is_own, value in variables:
        words = value.split()
        if len(words) == 4 and words[3].isdigit():  # noqa: PLR2004 (client, its port, server, its port)
            yield is_own, words


def _of_hex(text: str) -> bytes:
    """Convert an address of /proc/net/tcp: words of four bytes, each in the machine's byte order."""
    raw = bytes.fromhex(text)
    words = [raw[at : at + 4] for at in range(0, len(raw), 4)]
    return b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)


def _plain(address: bytes) -> bytes:
    """Return an IPv4-mapped IPv6 address as IPv4; other addresses as they are."""
    return address.removeprefix(_MAPPED) if len(address) == 16 else address  # noqa: PLR2004 (bytes of IPv6)


def _addresses() -> Iterator[tuple[str, bytes]]:
    """Yield every interface with each of its addresses."""
    route = Netlink(socket.NETLINK_ROUTE)
    try:
        for kind, body in route.dump(_RTM_GETADDR, _INFO.pack(socket.AF_UNSPEC, 0, 0, 0, 0)):
            if kind == _RTM_NEWADDR:
                attrs = attributes(body[_INFO.size :])
                name = socket.if_indextoname(_INFO.unpack_from(body)[4])
                yield name, attrs.get(_IFA_LOCAL) or attrs.get(_IFA_ADDRESS, b"")
    finally:
        route.close()


def _lines(path: str) -> list[str]:
    """Return the lines of a table of /proc/net, without its header."""
    return _read(path).splitlines()[1:]


def _words(path: str) -> list[list[str]]:
    """Return the words of each line of a table without header."""
    return [line.split() for line in _read(path).splitlines()]


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # it is gone, or never existed
        return []


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:  # a process that has ended, a kernel without IPv6
        return ""
