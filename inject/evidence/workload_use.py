"""What workloads used when a fault was armed and while it acted: the evidence of its exposure."""

from __future__ import annotations

import msgspec

__all__ = ["Exposure", "WorkloadUse"]


class WorkloadUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What workloads used at one moment (controller time, ns).

    Attributes:
        at_ns: the moment; of a use that was watched for a while, its end.
        rnics: RNICs (`host1:rxe0`) with a rank or a queue pair that still has work to do.
        gpus: GPUs (`host1:gpu0`) of these ranks.
        hosts: hosts that are used without an RNIC of theirs, for example for storage.
        paths: nodes that the data or the ACKs of queue pairs cross, each path once.
        by_pair: indexes into `paths` of the packets from one RNIC to another (`host1:rxe0>host3:rxe0`), data and ACKs.
        sprayed: (source, destination) of queue pairs without a path of their own: their packets take every uplink of
            the rack switches at both ends in turn.
        watched: names of links that were watched, with whether packets of queue pairs were seen on them.
        unread: hosts whose queue pairs could not be listed.
        unknown_paths: why there may be other paths than `paths`; None: these are all.
    """

    at_ns: int
    rnics: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    paths: tuple[tuple[str, ...], ...] = ()
    by_pair: dict[str, tuple[int, ...]] = {}
    sprayed: tuple[tuple[str, str], ...] = ()
    watched: dict[str, bool] = {}
    unread: tuple[str, ...] = ()
    unknown_paths: str | None = None


class Exposure(msgspec.Struct, frozen=True, kw_only=True):
    """What workloads used when a fault was armed, and while it acted, in the order of time.

    It is read before the fault is armed. If there is a workload then, and nothing shows that it uses the target, it is
    read again every few seconds until the fault is cleared. No use: no workload was known.
    """

    uses: tuple[WorkloadUse, ...] = ()
