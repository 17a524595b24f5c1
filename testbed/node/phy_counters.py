"""Port counters that only an RNIC's Ethernet driver has: errors before and beyond FEC, and pause frames.

They are those of `ethtool -S`, read by the same ioctl. Only ports of mlx5 are read; other drivers have other names.

Formats: linux/ethtool.h (ETHTOOL_GSSET_INFO, ETHTOOL_GSTRINGS, ETHTOOL_GSTATS), linux/if.h (struct ifreq). Names:
Documentation/networking/device_drivers/ethernet/mellanox/mlx5/counters.rst. Not yet run on hardware.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import struct

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BEYOND_FEC", "CORRECTED", "driver_counters", "phy_counts"]

CORRECTED = "rx_corrected_bits_phy"
"""Bits that FEC has corrected."""
BEYOND_FEC = "rx_pcs_symbol_err_phy"
"""Symbols with errors that FEC could not correct, or that arrived without FEC."""
_KEPT = frozenset(
    {CORRECTED, BEYOND_FEC, *(f"{way}_prio{number}_pause" for way in ("rx", "tx") for number in range(8))}
)
_SIOCETHTOOL, _GSSET_INFO, _GSTRINGS, _GSTATS = 0x8946, 0x37, 0x1B, 0x1D
_SS_STATS = 1
_IFREQ = struct.Struct("16sP16x")
_NAME_BYTES = 32
_DRIVER = "mlx5_core"


def phy_counts(folder: str = "/sys/class/net") -> Iterator[tuple[str, int]]:
    """Yield the kept counters of each port of an mlx5 RNIC, such as `be0.rx_corrected_bits_phy`."""
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel,
    ):
        for device in sorted(os.listdir(folder)):
            with contextlib.suppress(OSError):  # it has no driver, or is gone by now
                if os.path.basename(os.readlink(f"{folder}/{device}/device/driver")) != _DRIVER:
                    continue
                for name, value in driver_counters(channel, device).items():
                    if name in _KEPT:
                        yield f"{device}.{name}", value


def driver_counters(channel: socket.socket, device: str) -> dict[str, int]:
    """Return all counters of an interface's driver by name, as `ethtool -S` prints them.

    Raises:
        OSError: there is no such interface, or its driver has no counters.
    """
    info = _ask(channel, device, struct.pack("=IIQI", _GSSET_INFO, 0, 1 << _SS_STATS, 0))
    (count,) = struct.unpack_from("=I", info, 16)
    names = _ask(channel, device, struct.pack("=III", _GSTRINGS, _SS_STATS, count) + bytes(count * _NAME_BYTES))
    values = _ask(channel, device, struct.pack("=II", _GSTATS, count) + bytes(count * 8))
    texts = (names[12 + at * _NAME_BYTES :][:_NAME_BYTES] for at in range(count))
    numbers = struct.unpack_from(f"={count}Q", values, 8)
    return {text.split(b"\0")[0].decode(errors="replace"): value for text, value in zip(texts, numbers)}  # noqa: B905


def _ask(channel: socket.socket, device: str, request: bytes) -> bytes:
    """Send a request to the interface's driver; return the request as the kernel has filled it in."""
    buffer = array.array("B", request)
    fcntl.ioctl(channel, _SIOCETHTOOL, _IFREQ.pack(device.encode(), buffer.buffer_info()[0]))
    return buffer.tobytes()
