"""A holder beside its guardian, as real processes: the way to talk to it, and its process."""

from __future__ import annotations

from pathlib import Path


def send_request(channel, do, **rest):
    """The holder's answer to a request."""
    channel.send({"do": do, **rest})
    return channel.receive(timeout_s=30)


def holder_pid(channel):
    """The process of the holder: its guardian's only child."""
    children = Path(f"/proc/{channel.guardian_pid}/task/{channel.guardian_pid}/children").read_text().split()
    return int(children[0])
