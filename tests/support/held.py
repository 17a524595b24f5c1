"""Access to a holder that runs with its guardian as real processes."""

from __future__ import annotations

from pathlib import Path


def send_request(channel, do, **rest):
    """Send a request, and return the holder's answer."""
    channel.send({"do": do, **rest})
    return channel.receive(timeout_s=30)


def holder_pid(channel):
    """Return the process id of the holder, which is its guardian's only child."""
    children = Path(f"/proc/{channel.guardian_pid}/task/{channel.guardian_pid}/children").read_text().split()
    return int(children[0])
