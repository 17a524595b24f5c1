"""Read a capture file, pcap or pcapng.

Array arithmetic reads and decodes whole stretches of records. A damaged length makes the rest of the file unreadable,
because neither format has a mark to resume at. The frames before the damage are returned, and `Frames.damage` says
where it is and how many bytes are not read.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from faultbed.testbed.errors import UsageError
from faultbed.testbed.packets.frames import PADDING, Frames
from faultbed.testbed.packets.link_types import READ, refusal
from faultbed.testbed.packets.pcap_reader import parse_pcap
from faultbed.testbed.packets.pcapng_reader import parse_pcapng

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["read"]


def read(path: Path) -> Frames:
    """Read a pcap or pcapng file of either byte order, up to its end or to the first damage (`Frames.damage`).

    Raises:
        UsageError: the file is not readable, is not a capture, or no interface has a link type that is read. Frames of
            one such interface among others are kept, but nothing decodes them.
    """
    try:
        size = path.stat().st_size
        data = np.zeros(size + PADDING + -size % 4, dtype=np.uint8)
        with path.open("rb") as file:
            size = file.readinto(data[:size].data)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}; name a capture file (pcap or pcapng)") from error
    try:
        frames = parse_pcapng(data, size)
        if frames is None:
            frames = parse_pcap(data, size)
    except (struct.error, ValueError, IndexError) as error:
        raise UsageError(f"{path}: damaged capture file: {error}; capture again") from error
    if frames is None:
        raise UsageError(f"{path}: neither pcap nor pcapng; unpack a compressed file first")
    used = frames.link_types[np.unique(frames.interface)] if len(frames) else frames.link_types
    strange = [int(link_type) for link_type in used if link_type not in READ]
    if strange and len(strange) == len(used):
        raise UsageError(f"{path}: {refusal(strange[0])}")
    return frames
