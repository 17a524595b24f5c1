"""Join the parts of each rank's trace into operations. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import takewhile

from faultbed.testbed.errors import ConfigError
from faultbed.traffic.traces.trace import Operation, Part, RankTrace, Trace

__all__ = ["joined"]


def joined(source: str, format_: str, files: Sequence[RankTrace]) -> Trace:
    """Return the trace that several files form: one file that stands for all ranks, or one file per rank.

    Raises:
        ConfigError: the files contradict each other; the message names the files and records.
    """
    notes = tuple(note for file in files for note in file.notes)
    if len(files) == 1 and files[0].rank is None:
        world, operations = files[0].world, [_of_all_ranks(part) for part in _one_per_message(files[0].parts)]
    else:
        world = len(files)
        _check_world(files)
        operations = _matched(files)
    first_ns = min((ns for operation in operations for ns in operation.not_before_ns), default=0)
    counted = (
        dataclasses.replace(operation, not_before_ns=tuple(ns - first_ns for ns in operation.not_before_ns))
        for operation in operations
    )
    return Trace(source=source, format=format_, ranks=world, operations=tuple(counted), notes=notes)


def _check_world(files: Sequence[RankTrace]) -> None:
    for number, file in enumerate(files):
        if file.rank != number:
            raise ConfigError(
                f"{file.file}: ranks are numbered from 0 without a gap, and rank {number} has no file; "
                "give the traces of all ranks"
            )
        for part in file.parts:
            if beyond := [member for member in part.members if not 0 <= member < len(files)]:
                raise ConfigError(
                    f"{file.file}: record {part.record} needs rank {beyond[0]}, but there are files of {len(files)} "
                    "ranks; give the traces of all ranks"
                )


def _of_all_ranks(part: Part) -> Operation:
    """Return the operation of a part in a file that stands for all ranks: each member does the same."""
    size = len(part.members)
    return Operation(
        record=part.record,
        collective=part.collective,
        members=part.members,
        size_bytes=part.size_bytes,
        root=None if part.collective == "p2p" else part.root,
        counts=tuple(part.sends for _ in range(size)) if part.sends else (),
        pauses_ns=(part.pause_ns,) * size,
        not_before_ns=(part.not_before_ns,) * size,
        duration_ns=part.duration_ns,
        dtype=part.dtype,
    )


def _one_per_message(parts: Sequence[Part]) -> list[Part]:
    """Return the parts without repeated messages: a file may list a message at both of its ends."""
    kept: list[Part] = []
    open_: dict[tuple[object, ...], list[int]] = {}
    for part in parts:
        if part.collective == "p2p":
            key, other = (*part.members, part.size_bytes, part.root), (*part.members, part.size_bytes, _other_end(part))
            if open_.get(other):
                open_[other].pop(0)
                continue
            open_.setdefault(key, []).append(part.record)
        kept.append(part)
    return kept


def _other_end(part: Part) -> int:
    """Return the rank at the other end of a message, whose trace does not contain this part."""
    return part.members[1] if part.root == part.members[0] else part.members[0]


def _matched(files: Sequence[RankTrace]) -> list[Operation]:
    """Combine the parts of all ranks into operations. The parts of a rank stay in their order.

    Messages between the same two collectives of a rank may change places, if the ranks have them in different orders.
    """
    left = [list(file.parts) for file in files]
    operations: list[Operation] = []
    while any(left):
        match_at = next(
            (
                match
                for cross in (False, True)
                for rank in range(len(files))
                if (match := _ready(left, rank, cross=cross))
            ),
            None,
        )
        if match_at is None:
            raise ConfigError(_deadlock(files, left))
        parts = [left[rank][index] for rank, index in match_at]
        operations.append(_combined(files, parts))
        for rank, index in match_at:
            del left[rank][index]
    return operations


def _ready(left: Sequence[Sequence[Part]], rank: int, *, cross: bool) -> list[tuple[int, int]] | None:
    """Return (member, index of its part) of an operation that is next at this rank and all other members, or None.

    With `cross`, any of the consecutive messages at the head of a rank's parts may be next.
    """
    if not left[rank]:
        return None
    head = left[rank][0]
    if head.collective != "p2p":
        members = [(member, 0) for member in head.members]
        heads = [left[member][0] if left[member] else None for member in head.members]
        fits = all(part and (part.collective, part.members) == (head.collective, head.members) for part in heads)
        return members if fits else None
    for mine, part in enumerate(_messages(left[rank], cross=cross)):
        peer = part.members[1] if part.members[0] == rank else part.members[0]
        for theirs, other in enumerate(_messages(left[peer], cross=cross)):
            if peer != rank and other.members == part.members:
                ends = {rank: mine, peer: theirs}
                return [(member, ends[member]) for member in part.members]
    return None


def _messages(parts: Sequence[Part], *, cross: bool) -> list[Part]:
    return list(takewhile(lambda part: part.collective == "p2p", parts if cross else parts[:1]))


def _combined(files: Sequence[RankTrace], parts: Sequence[Part]) -> Operation:
    head = parts[0]
    sizes = {part.size_bytes for part in parts}
    names = " and ".join(dict.fromkeys(f"{files[m].file} record {p.record}" for m, p in _by_member(head, parts)))
    if head.collective != "all-to-allv" and len(sizes) > 1:
        listed = ", ".join(str(size) for size in sorted(sizes))
        raise ConfigError(f"{names}: sizes of one {head.collective} differ: {listed} bytes; give traces of one run")
    if head.collective != "p2p" and len({part.root for part in parts}) > 1:
        listed = ", ".join(f"{part.root} in rank {member}'s" for member, part in _by_member(head, parts))
        raise ConfigError(f"{names}: roots of one {head.collective} differ: {listed}; give traces of one run")
    counts = tuple(part.sends for part in parts) if head.sends else ()
    for number, (member, part) in enumerate(_by_member(head, parts) if counts else ()):
        sent = tuple(row[number] for row in counts)
        if part.receives and part.receives != sent:
            raise ConfigError(
                f"{files[member].file}: record {part.record}: rank {member} expects {list(part.receives)} bytes, and "
                f"the members send {list(sent)}; give traces of one run"
            )
    return Operation(
        record=head.record,
        collective=head.collective,
        members=head.members,
        size_bytes=max(sizes),
        root=None if head.collective == "p2p" else head.root,
        counts=counts,
        pauses_ns=tuple(part.pause_ns for part in parts),
        not_before_ns=tuple(part.not_before_ns for part in parts),
        duration_ns=max(part.duration_ns for part in parts),
        dtype=head.dtype,
    )


def _by_member(head: Part, parts: Sequence[Part]) -> list[tuple[int, Part]]:
    return list(zip(head.members, parts, strict=True))


def _deadlock(files: Sequence[RankTrace], left: Sequence[Sequence[Part]]) -> str:
    waits = [
        f"{file.file} record {parts[0].record} ({parts[0].collective} of ranks {list(parts[0].members)})"
        for file, parts in zip(files, left, strict=True)
        if parts
    ]
    ended = [file.file for file, parts in zip(files, left, strict=True) if not parts]
    also = f"; no record is left in {', '.join(ended)}" if ended else ""
    return f"the traces do not fit together: they wait for each other at {'; '.join(waits)}{also}"
