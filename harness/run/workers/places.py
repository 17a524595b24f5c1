"""Where workers are: what `--on` accepts. It needs none of the optional packages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast

from faultbed.testbed.errors import UsageError

__all__ = ["Place", "parse_place"]

_PLACE = re.compile(r"(local|ssh|slurm|tls):(.+)")
_LOCAL = re.compile(r"[1-9][0-9]{0,2}")
_PARTITION = re.compile(r"[\w.+-]+")
_SCHEDULER = re.compile(r"//[\w.\[\]:-]+:[0-9]{1,5}")
_FORMS = {"local": _LOCAL, "slurm": _PARTITION, "tls": _SCHEDULER}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """`where` is the number of workers (local), a list of hosts (ssh), a partition (slurm) or `//HOST:PORT` (tls)."""

    kind: Literal["local", "ssh", "slurm", "tls"]
    where: str

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
