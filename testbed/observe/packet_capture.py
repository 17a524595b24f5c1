"""Capture packets of chosen fabric ports, with a proof that none is missing.

    with packet_capture.start(lab, ["rtsw2:host4:rxe0"]) as running:
        ...
        captured = running.stop()
    pcapng_writer.write_pcapng(path, captured.frames)

It captures headers (`SNAP_BYTES` of each frame, whatever its protocol), on the switch's side of a link, in both
directions. Times of frames are the controller's wall clock; `Captured.epoch_offset_ns` converts them to its monotonic
clock.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from faultbed.testbed.errors import CommandFailed, LabError, UsageError
from faultbed.testbed.model.selectors import resolve, select
from faultbed.testbed.observe import clock
from faultbed.testbed.packets.frames import Frames
from faultbed.testbed.packets.link_types import ETHERNET

if TYPE_CHECKING:
    from faultbed.testbed.lab import Lab
    from faultbed.testbed.model.topology import Port, Topology
    from faultbed.testbed.remote.remote_node import Channel

__all__ = [
    "SNAP_BYTES",
    "Captured",
    "Capturing",
    "PortProof",
    "by_direction",
    "frames_of",
    "port_named",
    "port_proof",
    "start",
]

SNAP_BYTES = 128
LIMIT_BYTES = 192 << 20
"""Limit of the blocks on the capturing machine, about a million packets. Beyond it, the kernel drops and counts."""
_MODULE = "faultbed.testbed.node.capture"
_FOLDER = "/var/lib/faultbed/capture"
_START_S, _STOP_S, _FETCH_S = 60.0, 60.0, 300.0
_OUTGOING = 4
_PREFIX_WORDS, _HEADER_BYTES = 2, 48


@dataclass(frozen=True, slots=True, kw_only=True)
class PortProof:
    """The frames of a port in a capture, compared with the increment of the port's own counters. All are counts.

    `missing`: frames that the port counted and the capture lacks. `extra`: frames that the capture has and the port did
    not count, such as copies. Both are counted for each direction and added up, so that they do not cancel each other
    out. `drops`: frames that the kernel dropped because the capture was too slow.
    """

    name: str
    captured: int
    counted: int
    drops: int
    missing: int = 0
    extra: int = 0

    def __post_init__(self) -> None:
        # Older records have no `missing` and `extra`; the difference of the totals is their minimum.
        object.__setattr__(self, "missing", max(self.missing, self.counted - self.captured))
        object.__setattr__(self, "extra", max(self.extra, self.captured - self.counted))

    @property
    def is_whole(self) -> bool:
        """Whether no frame is missing, extra or dropped."""
        return not (self.missing or self.extra or self.drops)


def port_proof(name: str, *, captured: tuple[int, int], counted: tuple[int, int], drops: int) -> PortProof:
    """Compare the captured frames with those that the port counted, each as (received, sent)."""
    lacking = [of_port - of_capture for of_capture, of_port in zip(captured, counted, strict=True)]
    return PortProof(
        name=name,
        captured=sum(captured),
        counted=sum(counted),
        drops=drops,
        missing=sum(max(frames, 0) for frames in lacking),
        extra=sum(max(-frames, 0) for frames in lacking),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Captured:
    """A finished capture. `epoch_offset_ns`: a frame's time minus this is the controller's monotonic clock.

    `clock_error_ns` is the uncertainty of that clock between this machine and the capturing one.
    """

    frames: Frames
    proofs: tuple[PortProof, ...]
    epoch_offset_ns: int
    clock_error_ns: int


def port_named(topology: Topology, name: str) -> tuple[str, Port]:
    """Return the switch port that a user means: a link seen from a switch, or an RNIC, for the port that faces it.

    Returns the port's full name (`rtsw2:host4:rxe0`) and the port.

    Raises:
        UsageError: there is no such port, or its switch does not forward in its kernel.
    """
    target = resolve(topology, name)
    if target.link is None or target.kind not in ("port", "rnic"):
        raise UsageError(f'"{name}" is a {target.kind}; name a port, such as rtsw2:host4:rxe0')
    port = target.link.a if target.kind == "rnic" or target.port is None else target.port
    switch, other = topology.switch_by_name.get(port.node), target.link.other(port.node)
    if switch is None or not switch.forwards_in_kernel:
        raise UsageError(
            f"{port.node} forwards in an ASIC, where faultbed cannot capture; mirror the port, or name one of a Linux "
            "switch"
        )
    return ":".join([port.node, other.node, *([target.link.rnic] if target.link.rnic else [])]), port


def start(lab: Lab, ports: Sequence[str]) -> Capturing:
    """Start a capture; no packet is missed after this returns.

    Raises:
        UsageError: there is no such port, or its switch does not forward in its kernel.
        LabError: a machine could not capture.
    """
    by_machine: dict[str, dict[str, Port]] = {}
    for name, port in (port_named(lab.topology, selected) for text in ports for selected in select(lab.topology, text)):
        by_machine.setdefault(lab.carrier(port.node).name, {})[name] = port
    if len(by_machine) != 1:
        raise UsageError("a capture needs at least one port, and all its ports on one machine; name such ports")
    ((machine, ports_by_name),) = by_machine.items()
    return Capturing(lab, machine, ports_by_name)


class Capturing:
    """A running capture, made by `start`; it removes the taps however it ends."""

    def __init__(self, lab: Lab, machine: str, ports: Mapping[str, Port]) -> None:
        self._lab, self._machine = lab, machine
        self._file = f"{_FOLDER}/{secrets.token_hex(6)}"
        self._channel: Channel = lab.open_module(machine, _MODULE)
        try:
            self._clock = clock.measure(self._channel, timeout_s=_START_S)
            self._offset_ns = self._request(
                {
                    "do": "start",
                    "ports": [
                        {"name": name, "netns": lab.netns(port.node), "netdev": port.netdev}
                        for name, port in ports.items()
                    ],
                    "file": self._file,
                    "snap": SNAP_BYTES,
                    "limit_bytes": LIMIT_BYTES,
                },
                _START_S,
            )["epoch_offset_ns"]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def stop(self) -> Captured:
        """End the capture and fetch it. For an exact proof the ports should carry little traffic at this moment.

        Raises:
            LabError: the machine could not stop it, or the file is incomplete.
        """
        self._clock = clock.widened(self._clock, clock.measure(self._channel, timeout_s=_STOP_S))
        answer = self._request({"do": "stop"}, _STOP_S)
        node = self._lab.node(self._machine)
        done = node.run(["sh", "-c", 'gzip -1 <"$1" | base64 -w0', "fetch", self._file], timeout_s=_FETCH_S)
        content = gzip.decompress(base64.b64decode(done.stdout))
        if len(content) != answer["bytes"]:
            raise LabError(
                f"{self._machine}: a capture of {answer['bytes']} bytes arrived as {len(content)}; capture again"
            )
        self.close()
        # From the capturing machine's wall clock by both monotonic clocks to the controller's wall clock.
        epoch_ns = time.time_ns() - time.monotonic_ns()
        shift_ns = self._clock.offset_ns - int(self._offset_ns) + epoch_ns
        keep = [port["before"] + port["captured"] for port in answer["ports"]]
        names = tuple(str(port["name"]) for port in answer["ports"])
        frames = frames_of(content, names, keep=keep, shift_ns=shift_ns)
        early = frames_of(content, names, keep=[port["before"] for port in answer["ports"]], shift_ns=shift_ns)
        return Captured(
            frames=frames,
            proofs=tuple(
                port_proof(
                    str(port["name"]),
                    captured=(received, sent),
                    counted=(port["received"], port["sent"]),
                    drops=port["drops"],
                )
                for port, (received, sent) in zip(
                    answer["ports"], (by_direction(frames) - by_direction(early)).tolist(), strict=True
                )
            ),
            epoch_offset_ns=epoch_ns,
            clock_error_ns=self._clock.error_ns,
        )

    def close(self) -> None:
        """Close the channel; the machine removes taps and file. Safe to call twice."""
        with contextlib.suppress(OSError):
            self._channel.close()

    def _request(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        self._channel.send(request)
        answer = self._channel.receive(timeout_s=timeout_s)
        if answer is None:
            stderr = getattr(self._channel, "stderr", str)()
            raise CommandFailed(f"{self._machine}: the capture ended unexpectedly{f': {stderr}' if stderr else ''}")
        if answer.get("event") == "error":
            raise LabError(f"{self._machine}: {request['do']} of a capture failed: {answer.get('error')}")
        return answer


def by_direction(frames: Frames) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return how many frames each port has received and sent, of shape (ports, 2)."""
    ports = len(frames.interfaces)
    return np.bincount(2 * frames.interface.astype(np.int64) + frames.outbound, minlength=2 * ports).reshape(ports, 2)


def frames_of(content: bytes, names: Sequence[str], *, keep: Sequence[int], shift_ns: int) -> Frames:
    """Decode the file that `faultbed.testbed.node.capture` wrote, in the order of time.

    Args:
        content: the file: blocks of a TPACKET_V3 ring. The index of its port and its length precede each block.
        names: names of the ports, by index.
        keep: number of frames to keep of each port; later frames arrived after the last reading of its counters.
        shift_ns: added to each frame's time.

    Raises:
        LabError: the content is damaged or truncated.
    """
    data = np.frombuffer(content + bytes(SNAP_BYTES), dtype=np.uint8)
    words = data[: len(data) // 4 * 4].view("<u4").data if len(content) else memoryview(b"")
    places: list[list[int]] = [[] for _ in names]
    at = 0
    while at < len(content):
        port, length = (words[at >> 2], words[(at >> 2) + 1]) if at + 8 <= len(content) else (0, len(content))
        if length % 4:
            raise LabError(
                f"the capture is damaged: a block at byte {at} has {length} bytes, not a multiple of 4; capture again"
            )
        block = at + 4 * _PREFIX_WORDS
        if block + length > len(content):
            raise LabError(
                f"the capture ends within a block of {length} bytes at {at}: it is truncated; free disk space on the "
                "capturing machine"
            )
        # tpacket_block_desc: number of packets at 12, offset to the first at 16.
        count, frame = words[(block >> 2) + 3], block + words[(block >> 2) + 4]
        into = places[port]
        for _ in range(min(count, keep[port] - len(into))):
            into.append(frame)
            frame += words[frame >> 2]
        at = block + length
    interface = np.repeat(np.arange(len(names)), [len(starts) for starts in places])
    place = np.array([frame for starts in places for frame in starts], dtype=np.int64)
    fields = {name: _word(data, place, offset) for name, offset in _TPACKET3.items()}
    time_ns = fields["sec"] * 1_000_000_000 + fields["nsec"] + shift_ns
    order = np.argsort(time_ns, kind="stable")
    return Frames(
        data=data,
        start=(place + (fields["mac"] & 0xFFFF))[order],
        captured=fields["snap"][order],
        length=fields["length"][order],
        time_ns=time_ns[order],
        interface=interface[order].astype(np.int16),
        outbound=(data[place + _HEADER_BYTES + 10] == _OUTGOING)[order].astype(np.int8),
        interfaces=tuple(names),
        link_types=np.full(len(names), ETHERNET, dtype=np.int64),
    )


# tpacket3_hdr in linux/if_packet.h; a sockaddr_ll follows it, with the packet's type at 10.
_TPACKET3 = {"sec": 4, "nsec": 8, "snap": 12, "length": 16, "mac": 24}


def _word(data: np.ndarray[Any, np.dtype[np.uint8]], place: np.ndarray[Any, np.dtype[np.int64]], offset: int) -> Any:
    return sum(data[place + offset + index].astype(np.int64) << 8 * index for index in range(4))
