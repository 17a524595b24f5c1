"""What a run ran on: `environment.json`."""

from __future__ import annotations

import msgspec

from faultbed.harness.verdict import ExcludedHost

__all__ = ["Environment"]


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """`environment.json`: what the run ran on. Never environment variables, never anything secret.

    `started_utc` is when the run began (ISO 8601). `code` is the digest of our own sources
    (`faultbed.harness.record.code`); None: the run is older than that.
    `routing` is the routing scheme that the experiment chose; None: it chose none. `versions` are those of a rack's
    machines, by machine and part, such as `host1 mlx5_0 firmware`.
    """

    started_utc: str = ""
    faultbed: str
    git: str | None
    code: str | None = None
    python: str
    platform: str
    controller_kernel: str
    cpu_count: int
    qemu: str | None = None
    accelerator: str | None = None
    guest_kernel: str | None = None
    packages: dict[str, str] = {}
    versions: dict[str, str] = {}
    left_out: tuple[ExcludedHost, ...] = ()
    routing: str | None = None
