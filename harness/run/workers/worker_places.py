"""Where workers are: what `--on` accepts. It needs none of the optional packages."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal, cast

from faultbed.testbed.errors import UsageError

__all__ = ["JOBS", "Place", "parse_place", "with_options"]

JOBS = 2
"""Number of jobs of Slurm if the user gives none."""

_PLACE = re.compile(r"(local|ssh|slurm|tls):(.+)")
_LOCAL = re.compile(r"[1-9][0-9]{0,2}")
_PARTITION = re.compile(r"[\w.+-]+")
_SCHEDULER = re.compile(r"//[\w.\[\]:-]+:[0-9]{1,5}")
_FORMS = {"local": _LOCAL, "slurm": _PARTITION, "tls": _SCHEDULER}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where workers are.

    Attributes:
        kind: how they are started; `tls`: an operator has started them.
        where: the number of workers (local), a list of hosts (ssh), a partition (slurm) or `//HOST:PORT` (tls).
        jobs: number of jobs (slurm).
        interface: the network interface of this machine that they reach (ssh, slurm); None: loopback.
    """

    kind: Literal["local", "ssh", "slurm", "tls"]
    where: str
    jobs: int = JOBS
    interface: str | None = None

    def __str__(self) -> str:
        return f"{self.kind}:{self.where}"


def parse_place(text: str) -> Place:
    """Read `local:N`, `ssh:HOSTS`, `slurm:PARTITION` or `tls://SCHEDULER:PORT`.

    Raises:
        UsageError: it is none of them.
    """
    match = _PLACE.fullmatch(text)
    if match is None or (match[1] in _FORMS and not _FORMS[match[1]].fullmatch(match[2])):
        raise UsageError(
            f"--on {text}: no workers; give local:N, ssh:HOST,…, slurm:PARTITION or tls://SCHEDULER:PORT, or share the "
            "runs by --shard"
        )
    return Place(kind=cast("Literal['local', 'ssh', 'slurm', 'tls']", match[1]), where=match[2])


def with_options(place: Place | None, jobs: int | None, interface: str | None) -> Place | None:
    """Return a place with the options `--workers` and `--interface`; None: they were not given.

    Raises:
        UsageError: an option does not fit the place, or there is none.
    """
    if jobs is not None and (place is None or place.kind != "slurm"):
        raise UsageError(f"--workers {jobs}: only --on slurm:PARTITION has a number of jobs; give it with that")
    if interface is not None and (place is None or place.kind not in ("ssh", "slurm")):
        raise UsageError(
            f"--interface {interface}: only workers of --on ssh:HOST,… and slurm:PARTITION connect to this machine; "
            "give it with them"
        )
    return None if place is None else replace(place, jobs=jobs or JOBS, interface=interface)
