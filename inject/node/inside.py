"""Commands for a switch: in its network namespace, or on the machine that is the switch (`netns` None).

Used in the shell scripts of reverts, and in plans for people. If a namespace is gone, its contents are gone too: a
revert then does nothing, and succeeds.
"""

from __future__ import annotations

__all__ = ["inside", "ip", "name_of", "unless_gone", "vtysh"]


def inside(netns: str | None) -> str:
    """Return the prefix of a command that runs in the namespace, with a trailing space."""
    return f"ip netns exec {netns} " if netns else ""


def ip(netns: str | None) -> str:
    """Return the command `ip` for the namespace."""
    return f"ip -n {netns}" if netns else "ip"


def vtysh(netns: str | None) -> str:
    """Return the command of FRR's shell, for bgpd only (vtysh(1))."""
    return f"vtysh{f' -N {netns}' if netns else ''} -d bgpd"


def unless_gone(netns: str | None, script: str) -> str:
    """Return a script that does nothing if the namespace is gone."""
    guard = f"[ ! -e /run/netns/{netns} ] || " if netns else ""
    return f"{guard}{{ {script.rstrip('; ')}; }}"


def name_of(netns: str | None) -> str:
    """Return the name of the namespace, or `this machine`, for messages."""
    return netns or "this machine"
