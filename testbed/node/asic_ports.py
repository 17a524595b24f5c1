"""Port counters of a SONiC switch's ASIC, read from COUNTERS_DB over redis' own protocol.

The kernel's counters of a front-panel port cover only packets of the switch's CPU. syncd reads the ASIC's counters once
a second (FLEX_COUNTER_TABLE|PORT). A switch with several ASICs has a database for each, which is not supported.

Formats: redis serialization protocol (RESP2); COUNTERS_PORT_NAME_MAP and COUNTERS:oid:0x... (sonic-swss,
portsorch.cpp), fields named as in saiport.h. Not yet run on hardware.
"""

from __future__ import annotations

import contextlib
import socket

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, BinaryIO

__all__ = ["REDIS", "port_counts"]

REDIS = "/var/run/redis/redis.sock"
_COUNTERS_DB = "2"
_NAMES = "COUNTERS_PORT_NAME_MAP"
_TIMEOUT_S = 2.0
_PACKETS = {
    "asic_rx_packets": ("SAI_PORT_STAT_IF_IN_UCAST_PKTS", "SAI_PORT_STAT_IF_IN_NON_UCAST_PKTS"),
    "asic_tx_packets": ("SAI_PORT_STAT_IF_OUT_UCAST_PKTS", "SAI_PORT_STAT_IF_OUT_NON_UCAST_PKTS"),
    "asic_rx_dropped": ("SAI_PORT_STAT_IF_IN_DISCARDS",),
    "asic_tx_dropped": ("SAI_PORT_STAT_IF_OUT_DISCARDS",),
    "asic_rx_oversize": ("SAI_PORT_STAT_ETHER_RX_OVERSIZE_PKTS",),
    "asic_tx_oversize": ("SAI_PORT_STAT_ETHER_TX_OVERSIZE_PKTS",),
    "asic_ecn_marked": ("SAI_PORT_STAT_ECN_MARKED_PACKETS",),
    "asic_rx_pause": tuple(f"SAI_PORT_STAT_PFC_{priority}_RX_PKTS" for priority in range(8)),
    "asic_tx_pause": tuple(f"SAI_PORT_STAT_PFC_{priority}_TX_PKTS" for priority in range(8)),
}
_FIELDS = tuple(field for fields in _PACKETS.values() for field in fields)


def port_counts(path: str = REDIS) -> Iterator[tuple[str, int]]:
    """Yield the counters of each port, such as `Ethernet0.asic_tx_packets`; nothing without such a database."""
    try:
        with socket.socket(socket.AF_UNIX) as redis:
            redis.settimeout(_TIMEOUT_S)
            redis.connect(path)
            with redis.makefile("rb") as replies:
                counts = _read(redis, replies)
    except (OSError, ValueError):
        return
    yield from counts.items()


def _read(redis: socket.socket, replies: BinaryIO) -> dict[str, int]:
    counts: dict[str, int] = {}
    redis.sendall(_command("SELECT", _COUNTERS_DB) + _command("HGETALL", _NAMES))
    _reply(replies)
    flat = _reply(replies) or []
    ports = dict(zip(flat[::2], flat[1::2]))  # noqa: B905 - Python 3.9 has no strict
    redis.sendall(b"".join(_command("HMGET", f"COUNTERS:{oid}", *_FIELDS) for oid in ports.values()))
    for port in ports:
        values = dict(zip(_FIELDS, _reply(replies) or []))  # noqa: B905
        for name, fields in _PACKETS.items():
            values_of_fields = [values.get(field) for field in fields]
            with contextlib.suppress(TypeError, ValueError):  # the ASIC does not count it
                counts[f"{port}.{name}"] = sum(map(int, values_of_fields))  # type: ignore[arg-type]
    return counts


def _command(*words: str) -> bytes:
    parts = (b"$%d\r\n%s\r\n" % (len(raw), raw) for raw in (word.encode() for word in words))
    return b"*%d\r\n" % len(words) + b"".join(parts)


def _reply(replies: BinaryIO) -> Any:
    """Read one reply: a list, a text, a number as text, or None.

    Raises:
        ValueError: it is an error, or not a redis reply.
    """
    line = replies.readline()
    kind, rest = line[:1], line[1:].strip()
    if not line.endswith(b"\r\n") or kind not in b"+:$*":
        raise ValueError(f"redis says {line[:100]!r}")
    if kind == b"*":
        return [_reply(replies) for _ in range(int(rest))] if int(rest) >= 0 else None
    if kind == b"$":
        length = int(rest)
        if length < 0:
            return None
        body = replies.read(length + 2)
        if len(body) != length + 2:
            raise ValueError("redis ended in the middle of a reply")
        return body[:-2].decode(errors="replace")
    return rest.decode(errors="replace")
