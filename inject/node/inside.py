"""Where the commands of a switch run: in the network namespace that it is, or on the machine that it is (None).

Shell of reverts, and of plans that a person reads. A namespace that is gone took all that was in it along: a revert
has then nothing to do, and that is no failure.
"""

from __future__ import annotations

__all__ = ["inside", "ip", "name_of", "unless_gone", "vtysh"]


def inside(netns: str | None) -> str:
    """What comes before a command, with its blank."""
    return f"ip netns exec {netns} " if netns else ""


def ip(netns: str | None) -> str:
    """The command `ip`."""
    return f"ip -n {netns}" if netns else "ip"


def vtysh(netns: str | None) -> str:
    """FRR's shell, for its bgpd alone (vtysh(1))."""
    return f"vtysh{f' -N {netns}' if netns else ''} -d bgpd"


def unless_gone(netns: str | None, script: str) -> str:
    """A list of commands, done only where there is something to do them in."""
    there = f"[ ! -e /run/netns/{netns} ] || " if netns else ""
    return f"{there}{{ {script.rstrip('; ')}; }}"


def name_of(netns: str | None) -> str:
    """What a person calls it, in a message of the machine's own."""
    return netns or "this machine"
