"""Facts of a fingerprint about settings that a fault could leave changed: nftables, DCB, FRR, RDMA and GPUs.

They are read from the kernel, from a daemon's own socket or from the driver. Commands are run on SONiC only, because
each costs an emulated machine a tenth of a second. Facts leave out what changes without a fault: counters of packets
and PFC frames, and learnt neighbours.

Formats: linux/netfilter/nf_tables.h, dcbnl.h, ethtool.h, neighbour.h, rdma/rdma_netlink.h; FRR's lib/vty.c.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
import zlib

from faultbed.testbed.node.gpu import nvml
from faultbed.testbed.node.kernel_files import read
from faultbed.testbed.node.netlink import Netlink, attribute, attributes

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from faultbed.testbed.node.state import Facts

__all__ = [
    "UNKNOWN",
    "config_facts",
    "dcb_fact",
    "dcqcn_facts",
    "ethtool_fact",
    "frr_facts",
    "gid_facts",
    "gpu_facts",
    "is_hardware",
    "neighbour_facts",
    "nft_facts",
    "resource_facts",
    "roce_facts",
    "sonic_facts",
]

_NFT = 10 << 8
_GETTABLE, _GETCHAIN, _GETRULE, _GETSET = _NFT | 1, _NFT | 4, _NFT | 7, _NFT | 10
_NFPROTO = {1: "inet", 2: "ip", 3: "arp", 5: "netdev", 7: "bridge", 10: "ip6"}
_IPTABLES = ("filter", "nat", "mangle", "raw", "security")
"""Tables of iptables-nft, which container engines and other programs change at any time."""
_CHAIN_KEPT = (3, 4, 5, 7, 10)  # NFTA_CHAIN_NAME, HOOK, POLICY, TYPE, FLAGS; use counts and counters are left out
_SET_KEPT = (2, 3, 4, 5, 6, 7)  # NFTA_SET_NAME to NFTA_SET_DATA_LEN
_COUNTING = (b"counter", b"quota", b"last", b"connlimit")
"""nftables expressions whose data are counters, not settings."""
_PERMANENT = 0x80  # NUD_PERMANENT
_GETDCB, _IEEE_GET = 78, 21
_IEEE, _ETS, _PFC, _APP, _MAXRATE = 13, 1, 2, 3, 7
_PFC_SETTINGS = 6  # struct ieee_pfc up to its counters
_SIOCETHTOOL = 0x8946
_ETHTOOL = {"pause": (0x12, 3), "rings": (0x10, 8), "channels": (0x3C, 8), "fec": (0x50, 3)}
"""By setting: the command of linux/ethtool.h, and the number of integers that follow it in its structure."""
_INFINIBAND, _NETDEVS = "/sys/class/infiniband", "/sys/class/net"
_RDMA_CM, _MLX5 = "/sys/kernel/config/rdma_cm", "/sys/kernel/debug/mlx5"
_FRR = "/run/frr"
_SONIC = "/etc/sonic"
_VTY_TIMEOUT_S, _COMMAND_TIMEOUT_S = 2.0, 30.0
_VTY_END = b"\0\0\0"
UNKNOWN = "unknown"
"""Prefix of a fact that could not be read. It differs from every other fact, even from another unknown one."""
_STRUCTURAL_LINES = ("!", "exit", "end", "exit-address-family", "exit-vrf")
_QP_GET, _MR_GET, _DEVICES = (5 << 10) | 10, (5 << 10) | 13, (5 << 10) | 1
_RESOURCES = {"qp": (_QP_GET, 19), "mr": (_MR_GET, 40)}  # RDMA_NLDEV_ATTR_RES_QP, _RES_MR
_PID = 28  # RDMA_NLDEV_ATTR_RES_PID


def nft_facts(netfilter: Netlink) -> Facts:
    """Yield the nftables tables. The fact of a table has the size and a checksum of its content."""
    tables = [(body[0], _text(attributes(body[4:])[1])) for _, body in netfilter.dump(_GETTABLE, bytes(4))]
    content: dict[tuple[int, str], list[bytes]] = {table: [] for table in tables}
    if any(name not in _IPTABLES for _, name in tables):
        for request, kept in ((_GETCHAIN, _CHAIN_KEPT), (_GETSET, _SET_KEPT), (_GETRULE, ())):
            for _, body in netfilter.dump(request, bytes(4)):
                entry = attributes(body[4:])
                parts = [entry.get(kind, b"") for kind in kept] or [entry.get(2, b""), *_expressions(entry.get(4, b""))]
                content.setdefault((body[0], _text(entry[1])), []).append(b"\1".join(parts))
    for (family, name), parts in content.items():
        fact = "there"
        if parts and name not in _IPTABLES:
            fact = f"chains, sets and rules {len(parts)}, content {zlib.crc32(bytes(2).join(parts)):08x}"
        yield f"nft table {_NFPROTO.get(family, family)} {name}", fact


def _expressions(raw: bytes) -> Iterator[bytes]:
    for element in _list_entries(raw):
        expression = attributes(element)
        name = expression.get(1, b"").rstrip(b"\0")
        yield name + (b"" if name in _COUNTING else expression.get(2, b""))


def _list_entries(raw: bytes) -> Iterator[bytes]:
    """Yield the values of the attributes in a list. Their types are ignored."""
    offset = 0
    while offset + 4 <= len(raw):
        (length,) = struct.unpack_from("=H", raw, offset)
        yield raw[offset + 4 : offset + length]
        offset += max(4, (length + 3) & ~3)


def neighbour_facts(body: bytes, names: Mapping[int, str]) -> Facts:
    """Yield the neighbour in an RTM_NEWNEIGH body if it is configured; a learnt neighbour yields nothing."""
    family, index, state = struct.unpack_from("=B3xiH", body)
    values = attributes(body[12:])
    if state & _PERMANENT and family in (socket.AF_INET, socket.AF_INET6) and 1 in values:
        address = socket.inet_ntop(family, values[1])
        yield f"neighbour {names.get(index, '?')} {address}", values.get(2, b"").hex(":") or "no address"


def is_hardware(netdev: str) -> bool:
    """Return whether an interface is a hardware device. Only such a device has DCB and ethtool settings."""
    try:
        driver = os.readlink(f"/sys/class/net/{netdev}/device/driver")
    except OSError:
        return False
    return not driver.endswith("/virtio_net")


def dcb_fact(route: Netlink, netdev: str) -> Facts:
    """Yield PFC, ETS, priority map and rate limits of an interface; nothing if its driver has no DCB."""
    with contextlib.suppress(OSError):
        answer = route.request(_GETDCB, struct.pack("=BBxx", 0, _IEEE_GET) + attribute(1, netdev.encode() + b"\0"))
        values = attributes(attributes(answer[4:]).get(_IEEE, b""))
        kept = {
            "pfc": values.get(_PFC, b"")[:_PFC_SETTINGS],
            "ets": values.get(_ETS, b""),
            "app": values.get(_APP, b""),
        }
        kept["maxrate"] = values.get(_MAXRATE, b"")
        fact = " ".join(f"{name} {raw.hex()}" for name, raw in kept.items() if raw)
        if fact:
            yield f"dcb {netdev}", fact


def ethtool_fact(netdev: str) -> Facts:
    """Yield pause, ring, channel and FEC settings of an interface."""
    parts = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as control:
        for name, (command, count) in _ETHTOOL.items():
            with contextlib.suppress(OSError):
                numbers = _ethtool(control, netdev, command, count)
                # For FEC only the configured modes (the second number): the active mode is a state of the link.
                parts.append(f"{name} {' '.join(map(str, numbers[1:2] if name == 'fec' else numbers))}")
    if parts:
        yield f"ethtool {netdev}", ", ".join(parts)


def _ethtool(control: socket.socket, netdev: str, command: int, count: int) -> tuple[int, ...]:
    import array  # noqa: PLC0415 - only for hosts with hardware

    data = array.array("B", struct.pack(f"=I{count}I", command, *[0] * count))
    fcntl.ioctl(control, _SIOCETHTOOL, struct.pack("16sP16x", netdev.encode(), data.buffer_info()[0]))
    return struct.unpack(f"={count}I", data.tobytes()[4:])


def dcqcn_facts(netdev: str) -> Facts:
    """Yield each DCQCN setting of an interface (MLNX_OFED, /sys/class/net/DEV/ecn)."""
    yield from _file_facts(f"ecn {netdev}", f"{_NETDEVS}/{netdev}/ecn")


def roce_facts(device: str, port: str) -> Facts:
    """Yield type of service, traffic class and DCQCN settings of an RDMA port; a device that is made anew has defaults.

    They are in configfs (Documentation/ABI/testing/configfs-rdma_cm), in `tc` (MLNX_OFED) and in debugfs
    (drivers/infiniband/hw/mlx5/cong.c).
    """
    function = os.path.basename(os.path.realpath(f"{_INFINIBAND}/{device}/device"))
    for folder in (
        f"{_RDMA_CM}/{device}/ports/{port}",
        f"{_INFINIBAND}/{device}/tc/{port}",
        f"{_MLX5}/{function}/cc_params",
    ):
        yield from _file_facts(f"roce {device}/{port}", folder)


def _file_facts(subject: str, folder: str) -> Facts:
    """Yield the content of each file below a folder that can be read; nothing without such a folder."""
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                setting = os.path.relpath(f"{path}/{name}", folder)
                yield f"{subject} {setting}", " ".join(read(f"{path}/{name}").split())


def gid_facts(device: str, port: str) -> Facts:
    """Yield each GID of a port with its types, over the whole table.

    Table indexes are left out: after a flap an address is back at other entries than before. A GID has an entry for
    each type; the fact lists the types sorted, because their order in the table may change, too.
    """
    folder = f"{_INFINIBAND}/{device}/ports/{port}"
    types_by_gid: dict[str, set[str]] = {}
    try:
        entries = os.listdir(f"{folder}/gids")
    except FileNotFoundError:  # the device has gone since it was listed, which another fact shows
        return
    for index in entries:
        # The kernel refuses to read the type of an empty entry (core/sysfs.c, show_port_gid_attr_gid_type).
        with contextlib.suppress(OSError):
            gid = read(f"{folder}/gids/{index}").strip()
            if gid.strip("0:"):
                types_by_gid.setdefault(gid, set()).add(read(f"{folder}/gid_attrs/types/{index}").strip())
    for gid, types in types_by_gid.items():
        yield f"gid {device}/{port} {gid}", ", ".join(sorted(types))


def resource_facts(programs: Mapping[int, str]) -> Facts:
    """Yield the numbers of queue pairs and memory regions of each faultbed program, and of each process that has ended.

    `programs` has the names of the faultbed programs by process id.
    """
    counts_by_owner: dict[str, dict[str, int]] = {}
    try:
        with contextlib.closing(Netlink(20)) as rdma:
            for kind, resource in _rdma_resources(rdma):
                if (owner := _owner(resource, programs)) is not None:
                    counts = counts_by_owner.setdefault(owner, {})
                    counts[kind] = counts.get(kind, 0) + 1
    except OSError as error:
        if os.path.isdir(_INFINIBAND) and os.listdir(_INFINIBAND):  # otherwise no device could have resources
            yield "rdma netlink", f"{UNKNOWN}: {error}"
    for owner, counts in counts_by_owner.items():
        yield f"rdma resources {owner}", ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


def _rdma_resources(rdma: Netlink) -> Iterator[tuple[str, Mapping[int, bytes]]]:
    """Yield the kind and the attributes of every queue pair and memory region, of all devices that list them."""
    devices = [attributes(body)[1] for _, body in rdma.dump(_DEVICES, b"")]
    for kind, (request, table) in _RESOURCES.items():
        for device in devices:
            with contextlib.suppress(OSError):
                for _, body in rdma.dump(request, attribute(1, device)):
                    for entry in _list_entries(attributes(body).get(table, b"")):
                        yield kind, attributes(entry)


def _owner(resource: Mapping[int, bytes], programs: Mapping[int, str]) -> str | None:
    """Return the owner of an RDMA resource if it is a faultbed program or an ended process; otherwise None."""
    pid = int.from_bytes(resource.get(_PID, b""), "little")
    if pid in programs:
        return programs[pid]
    return None if not pid or os.path.exists(f"/proc/{pid}") else f"process {pid}, which has ended"


def frr_facts(netns: str | None) -> Facts:
    """Yield one fact per line of the running configuration of a switch's routing daemons."""
    folder = f"{_FRR}/{netns}" if netns else _FRR
    daemons = []
    with contextlib.suppress(OSError):
        daemons = sorted(name[: -len(".vty")] for name in os.listdir(folder) if name.endswith(".vty"))
    if not daemons and netns is None and os.path.isdir(_SONIC):
        yield from _vtysh_facts()
    for daemon in daemons:
        if daemon != "watchfrr":
            yield from _daemon_facts(daemon, f"{folder}/{daemon}.vty")


def _vtysh_facts() -> Facts:
    """Yield the configuration that vtysh prints: it connects to SONiC's daemons, which run in a container."""
    try:
        yield from config_facts("vtysh", _output_of(["vtysh", "-c", "show running-config"]).splitlines()[3:])
    except OSError as error:
        yield "frr vtysh", f"{UNKNOWN}: {error}"


def _daemon_facts(daemon: str, path: str) -> Facts:
    try:
        text = _vty(path, "show running-config")
    except ConnectionRefusedError:  # the daemon has ended, which another fact shows: the number of its processes
        return
    except OSError as error:
        yield f"frr {daemon}", f"{UNKNOWN}: does not answer: {error}"
        return
    yield from config_facts(daemon, text.splitlines())


def sonic_facts() -> Facts:
    """Yield a checksum of each table of SONiC's running configuration.

    It has ACLs and ports that the kernel does not know. Not yet run on hardware.
    """
    if os.path.isdir(_SONIC):
        try:
            tables = json.loads(_output_of(["sonic-cfggen", "-d", "--print-data"]))
        except (OSError, ValueError) as error:
            yield "config_db", f"{UNKNOWN}: {error}"
            return
        for table, rows in tables.items():
            content = json.dumps(rows, sort_keys=True)
            yield f"config_db {table}", f"{len(rows)} rows, content {zlib.crc32(content.encode()):08x}"


def _output_of(argv: list[str]) -> str:
    import subprocess  # noqa: PLC0415 - only for SONiC: a tenth of the watcher's import time

    try:
        return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S).stdout
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from error


def config_facts(daemon: str, lines: Iterable[str]) -> Facts:
    """Yield one fact per configuration line, with the lines that enclose it. A password is replaced by its checksum."""
    nested: list[tuple[int, str]] = []
    for line in lines:
        text, indent = line.strip(), len(line) - len(line.lstrip())
        if not text or text in _STRUCTURAL_LINES:
            continue
        while nested and nested[-1][0] >= indent:
            nested.pop()
        head, word, secret = text.partition("password ")
        text = f"{head}{word}{zlib.crc32(secret.encode()):08x}" if word else text
        yield f"frr {daemon} " + " / ".join([*(outer for _, outer in nested), text]), "configured"
        nested.append((indent, text))


def _vty(path: str, command: str) -> str:
    """Run a command on a daemon's vtysh socket and return its text. Three zeros and a status follow it (lib/vty.c)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as vty:
        vty.settimeout(_VTY_TIMEOUT_S)
        vty.connect(path)
        answer = b""
        for line in ("enable", command):
            vty.sendall(line.encode() + b"\0")
            answer = b""
            while answer[-4:-1] != _VTY_END:
                part = vty.recv(65536)
                if not part:
                    raise OSError(f"{path} closed the connection")
                answer += part
        if answer[-1]:
            raise OSError(f"status {answer[-1]} of `{command}`")
        return answer[:-4].decode(errors="replace")


def gpu_facts() -> Facts:
    """Yield the settings of each NVIDIA GPU: power limit, locked or application clocks, persistence mode."""
    try:
        gpus = nvml.settings()
    except nvml.NoNvml as error:
        yield "gpus", f"{UNKNOWN}: {error}"
        return
    for gpu in gpus:
        yield f"gpu {gpu['bus_id']}", ", ".join(f"{name} {gpu[name]}" for name in sorted(gpu) if name != "bus_id")


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode()
