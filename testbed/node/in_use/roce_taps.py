"""Notice RoCEv2 packets at ports of this machine, without capturing them.

Each port has a packet socket whose filter the kernel runs: it keeps one byte of a RoCEv2 packet, two bytes of a frame
that may hide one in a tunnel or by encryption, and nothing of any other frame. A flow therefore costs its switch one
short program per packet, and no copy once the socket's buffer is full.

Formats: Linux, networking/filter.rst (classic BPF); IANA, EtherTypes, protocol numbers and UDP ports.
"""

from __future__ import annotations

import array
import errno
import socket
import struct

from faultbed.testbed.node import netns

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["RoceTaps", "attach_filter", "filter_program", "seen"]

_ETH_P_ALL, _SO_ATTACH_FILTER = 3, 26
_ROCE, _HIDDEN = 1, 2
"""Bytes that the filter keeps of a RoCEv2 packet, and of a frame that may hide one."""
_PORT = 4791
_IPV4, _IPV6, _UDP = 0x0800, 0x86DD, 17
_VLANS = (0x8100, 0x88A8, 0x9100, 0x9200)
_HIDING_TYPES = (0x8847, 0x8848, 0x8864, 0x88E5, 0x88E7, 0x894F, 0x22F3)
"""MPLS, PPPoE, MACsec, provider backbone, NSH, TRILL."""
_HIDING_PROTOCOLS = (4, 41, 47, 50, 51, 137)
"""IP in IP, GRE, IPsec, MPLS in IP."""
_EXTENSIONS = (0, 43, 44, 60, 135, 139, 140)
"""Extension headers of IPv6, which the filter does not skip."""
_HIDING_PORTS = (4789, 8472, 6081, 4500, 4790, 6635, 51820, 2152)
"""VXLAN, Geneve, IPsec, VXLAN-GPE, MPLS in UDP, WireGuard, GTP-U."""
_FIRST, _MOST_TAGS = 14, 3
"""Length of an Ethernet header; number of VLAN tags that the filter skips."""
_LOAD_HALF, _LOAD_BYTE, _LOAD_HALF_AT_X, _LOAD_X_IPV4 = 0x28, 0x30, 0x48, 0xB1
_IF_EQUAL, _IF_ANY, _RETURN = 0x15, 0x45, 0x06
_LATER_FRAGMENT = 0x1FFF
_INSTRUCTION = struct.Struct("=HBBI")  # struct sock_filter of linux/filter.h
_AT_MOST = 4096
"""Frames that are read from a socket: more than its buffer has."""


class RoceTaps:
    """Packet sockets at some ports, by name. Nothing is missed after this is made."""

    def __init__(self, ports: Mapping[str, tuple[str | None, str]]) -> None:
        """Open the sockets; `ports` has the network namespace and the interface of each port.

        Raises:
            OSError: there is no such namespace or interface, or this user may not open packet sockets.
        """
        self._netdevs = {name: netdev for name, (_, netdev) in ports.items()}
        self._sockets: dict[str, socket.socket] = {}
        try:
            for name, (namespace, netdev) in ports.items():
                self._sockets[name] = _tap(namespace, netdev)
        except BaseException:
            self.close()
            raise
        finally:
            netns.enter(None)

    def seen(self) -> dict[str, bool | None]:
        """Return, for each port, whether a RoCEv2 packet has crossed it; None: only frames that may hide one.

        Raises:
            OSError: an interface is not there any more, so that packets may have been missed.
        """
        return {name: self._seen(name, tap) for name, tap in self._sockets.items()}

    def _seen(self, name: str, tap: socket.socket) -> bool | None:
        if tap.getsockname()[0] != self._netdevs[name]:  # the kernel forgets an interface that is removed
            raise OSError(f"{self._netdevs[name]} was removed or renamed while it was watched; run the command again")
        return seen(tap)

    def close(self) -> None:
        """Close the sockets."""
        for tap in self._sockets.values():
            tap.close()


def _tap(namespace: str | None, netdev: str) -> socket.socket:
    netns.enter(namespace)
    # Protocol 0: the socket receives nothing until it is bound, so it never has frames of other ports.
    tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
    try:
        attach_filter(tap)
        tap.setblocking(False)  # noqa: FBT003 (the socket module's own form)
        tap.bind((netdev, _ETH_P_ALL))
    except BaseException:
        tap.close()
        raise
    return tap


def attach_filter(tap: socket.socket) -> None:
    """Let a socket keep what `seen` reads of each frame."""
    program = array.array("B", filter_program())
    code = struct.pack("HP", len(program) // _INSTRUCTION.size, program.buffer_info()[0])
    tap.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, code)


def seen(tap: socket.socket) -> bool | None:
    """Return whether a socket has received a RoCEv2 packet; None: only frames that may hide one.

    Raises:
        OSError: the socket cannot be read.
    """
    is_hidden = False
    for _ in range(_AT_MOST):
        try:
            kept = len(tap.recv(_FIRST))
        except BlockingIOError:
            break
        except OSError as error:
            if error.errno != errno.ENETDOWN:  # reported once, before the frames from before that
                raise
            continue
        if kept == _ROCE:
            return True
        is_hidden = True
    return None if is_hidden else False


def filter_program() -> bytes:
    """Return the filter: for each frame, the number of bytes that are kept of it. Pure."""
    lines: list[tuple[int, int, str, str] | str] = []
    for tags in range(_MOST_TAGS + 1):
        lines += _of_frame(_FIRST + 4 * tags, "hidden" if tags == _MOST_TAGS else f"frame {_FIRST + 4 * (tags + 1)}")
    lines += ["ports", *_when(_IF_EQUAL, _HIDING_PORTS, "hidden")]
    for label, kept in (("other", 0), ("roce", _ROCE), ("hidden", _HIDDEN)):
        lines += [label, (_RETURN, kept, "", "")]
    return b"".join(_assembled(lines))


def _of_frame(at: int, tagged: str) -> Iterator[tuple[int, int, str, str] | str]:
    """Yield the part of the filter for frames whose IP header begins at `at`."""
    yield f"frame {at}"
    yield (_LOAD_HALF, at - 2, "", "")
    yield from _when(_IF_EQUAL, _VLANS, tagged)
    yield from _when(_IF_EQUAL, _HIDING_TYPES, "hidden")
    yield from _when(_IF_EQUAL, (_IPV6,), f"ipv6 {at}")
    yield (_IF_EQUAL, _IPV4, "", "other")
    yield (_LOAD_BYTE, at + 9, "", "")
    yield from _when(_IF_EQUAL, _HIDING_PROTOCOLS, "hidden")
    yield (_IF_EQUAL, _UDP, "", "other")
    yield (_LOAD_HALF, at + 6, "", "")
    yield (_IF_ANY, _LATER_FRAGMENT, "other", "")
    yield (_LOAD_X_IPV4, at, "", "")
    yield (_LOAD_HALF_AT_X, at + 2, "", "")
    yield (_IF_EQUAL, _PORT, "roce", "ports")
    yield f"ipv6 {at}"
    yield (_LOAD_BYTE, at + 6, "", "")
    yield from _when(_IF_EQUAL, (*_HIDING_PROTOCOLS, *_EXTENSIONS), "hidden")
    yield (_IF_EQUAL, _UDP, "", "other")
    yield (_LOAD_HALF, at + 42, "", "")
    yield (_IF_EQUAL, _PORT, "roce", "ports")


def _when(code: int, values: Sequence[int], then: str) -> Iterator[tuple[int, int, str, str]]:
    return ((code, value, then, "") for value in values)


def _assembled(lines: Sequence[tuple[int, int, str, str] | str]) -> Iterator[bytes]:
    """Yield each instruction; names of places are replaced by distances, at most 255."""
    places: dict[str, int] = {}
    number = 0
    for line in lines:
        if isinstance(line, str):
            places[line] = number
        else:
            number += 1
    instructions = [line for line in lines if not isinstance(line, str)]
    for at, (code, value, then, otherwise) in enumerate(instructions):
        jumps = [places[name] - at - 1 if name else 0 for name in (then, otherwise)]
        yield _INSTRUCTION.pack(code, *jumps, value)
