"""PARAM comms traces: the "basic" trace of commsTraceReplay, a JSON list of what one rank does.

A record is `{"comms": name, "in_msg_size", "out_msg_size", "dtype", "req", "startTime_ns", "pg_id", "world_size",
"root", "in_split", "out_split", "src_rank", "dst_rank", "use_batch", "global_ranks", "markers"}`, or `{"compute":
"gemm" | "emb_lookup", ...}`; sizes and splits are in elements. The record `{"comms": "init", "pg_id", "global_ranks",
"world_size"}` creates a process group. A trace is a folder of `<rank>.json`, or one file for all ranks
(`--use-one-trace` in PARAM). A PyTorch execution trace is read as such records
(`faultbed.traffic.traces.execution_trace`). Source: facebookresearch/param,
train/comms/pt/commsTraceParser.py and comms_utils.py.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from faultbed.testbed.errors import ConfigError
from faultbed.traffic.traces import execution_trace
from faultbed.traffic.traces.trace import MOST_RANKS, Note, Operation, Part, RankTrace, Trace, group_of

__all__ = ["content_for", "read"]

ITEM_BYTES = {
    "float": 4, "float32": 4, "float16": 2, "float64": 8, "double": 8, "int32": 4, "int": 4, "long": 8, "bfloat16": 2,
    "bool": 1, "half": 2, "byte": 1, "uint8": 1, "int8": 1, "short": 2, "char": 1, "signed char": 1,
    "unsigned char": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
}  # fmt: skip
COLLECTIVES = {
    "allreduce": "all-reduce",
    "allreducecoalesced": "all-reduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "allgather": "all-gather",
    "allgatherbase": "all-gather",
    "allgatherintotensorcoalesced": "all-gather",
    "reducescatter": "reduce-scatter",
    "reducescatterbase": "reduce-scatter",
    "reducescattertensorcoalesced": "reduce-scatter",
    "alltoall": "all-to-all",
    "alltoallv": "all-to-allv",
    "alltoallbase": "all-to-allv",
    "alltoallsingle": "all-to-allv",
    "barrier": "barrier",
    "send": "send",
    "isend": "send",
    "recv": "recv",
    "irecv": "recv",
    "recvanysource": "recv",
}
WRITTEN = {
    "all-reduce": "all_reduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "all-to-allv": "all_to_allv",
    "barrier": "barrier",
}
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int32": "int32"}
BARRIER_BYTES = 4
NOTHING_TO_DO = ("wait", "init", "batchisendirecv")
"""Records without work: operations are replayed one after the other, like blocking ones, so no wait is needed."""


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a record that this module uses."""

    comms: str | None = None
    compute: str | None = None
    in_msg_size: int | None = None
    out_msg_size: int | None = None
    dtype: str | None = None
    start_ns: int | None = msgspec.field(name="startTime_ns", default=None)
    pg_id: int | None = None
    world_size: int | None = None
    root: int | None = None
    in_split: list[int] | None = None
    out_split: list[int] | None = None
    src_rank: int | None = None
    dst_rank: int | None = None
    global_ranks: list[int] | None = None


def read(file: str, content: bytes, *, rank: int | None, world: int | None) -> RankTrace:
    """Read one file. `world` is the number of ranks, if the trace does not say it.

    Raises:
        ConfigError: the file is truncated, is no PARAM trace, or has an invalid record; with the record number from 0.
    """
    numbered = _records(file, content, rank)
    groups: dict[int | None, tuple[int, ...]] = {}
    numbers_of_ranks: list[int] = []
    for number, record in numbered:
        try:
            listed = group_of(record.global_ranks or ())
        except ValueError as error:
            raise ConfigError(f"{file}: record {number}: {error}") from error
        ranks = (*listed, record.src_rank or 0, record.dst_rank or 0)
        numbers_of_ranks.append(max(record.world_size or 0, 1 + max(ranks)))
        if numbers_of_ranks[-1] > MOST_RANKS:
            raise ConfigError(
                f"{file}: record {number}: {numbers_of_ranks[-1]:,} ranks; at most {MOST_RANKS:,} are read"
            )
        if record.pg_id is not None and listed:
            groups[record.pg_id] = listed
    largest = max(numbers_of_ranks, default=1)
    world = largest if largest > 1 else world
    if world is None:
        raise ConfigError(f"{file}: no record gives the number of ranks; give it explicitly")
    everyone = tuple(range(world))
    groups = {None: everyone, 0: everyone, **groups}
    parts: list[Part] = []
    notes: list[Note] = []
    for number, record in numbered:
        try:
            part = _part(number, record, groups, rank)
        except ValueError as error:
            raise ConfigError(f"{file}: record {number}: {error}") from error
        if isinstance(part, Part):
            parts.append(dataclasses.replace(part, not_before_ns=record.start_ns or 0))
        elif part is not None:
            text, blocks = part
            notes.append(Note(file=file, record=number, what=text, blocks=blocks))
    return RankTrace(file=file, rank=rank, world=world, parts=tuple(parts), notes=tuple(notes))


def _records(file: str, content: bytes, rank: int | None) -> list[tuple[int, _Record]]:
    """Return the records of a file with their numbers: positions in a PARAM trace, node identifiers in PyTorch's."""
    try:
        raw = json.loads(content)
    except (ValueError, RecursionError) as error:
        cut = not content.rstrip().endswith((b"]", b"}"))
        problem = "the trace is truncated" if cut else "not JSON"
        raise ConfigError(f"{file}: {problem}: {error}; copy the whole file again") from error
    if isinstance(raw, Mapping) and isinstance(raw.get("nodes"), list):
        items = list(execution_trace.records(file, raw, rank=rank))
    elif isinstance(raw, list):
        items = list(enumerate(raw))
    else:
        raise ConfigError(
            f"{file}: neither a PARAM comms trace, which is a JSON list of records, nor a PyTorch execution trace, "
            'which has "nodes"; convert it with chakra_converter'
        )
    records = []
    for number, item in items:
        try:
            records.append((number, msgspec.convert(item, _Record)))
        except (msgspec.ValidationError, UnicodeError) as error:  # JSON can escape half of a surrogate pair
            raise ConfigError(f"{file}: record {number}: {error}") from error
    return records


def _part(
    number: int, record: _Record, groups: Mapping[int | None, tuple[int, ...]], rank: int | None
) -> Part | tuple[str, bool] | None:
    """Return a record's part; or (why it is not replayed, whether that blocks the replay); or None: nothing to do."""
    if record.compute is not None:
        return f"compute {record.compute}: it has no duration in a trace; skipped", False
    if record.comms is None:
        raise ValueError("the record has neither comms nor compute")
    name = "".join(letter for letter in record.comms.lower() if letter.isalpha())
    kind = COLLECTIVES.get(name)
    if kind is None:
        return None if name in NOTHING_TO_DO else (f"{record.comms}: this collective is not supported", True)
    if kind in ("send", "recv"):
        sent, received, _ = _sizes(record)
        return _message(number, record, rank, sent if kind == "send" else received, sends=kind == "send")
    members = _members(record, groups)
    if len(members) == 1 or (rank is not None and rank not in members):
        return f"{record.comms} of ranks {list(members)}: it has only one rank, or not this one; skipped", False
    if kind == "barrier":
        return Part(record=number, collective=kind, members=members, size_bytes=BARRIER_BYTES)
    return _collective(number, record, kind, members)


def _collective(number: int, record: _Record, kind: str, members: tuple[int, ...]) -> Part | tuple[str, bool]:
    sent, received, item = _sizes(record)
    count = len(members)
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    size = {"all-gather": received or sent * count, "broadcast": max(sent, received)}.get(kind, sent)
    if kind == "all-to-allv":
        sends = _split(record.in_split, sent, item, count)
        receives = _split(record.out_split, received, item, count) if record.out_split else ()
        size = max(sum(sends), sum(receives))
    if size <= 0:
        return f"{record.comms} of 0 bytes; skipped", False
    return Part(
        record=number,
        collective=kind,
        members=members,
        size_bytes=size,
        root=(members[0] if record.root is None else record.root) if kind in ("broadcast", "reduce") else None,
        sends=sends,
        receives=receives,
        dtype=record.dtype,
    )


def _members(record: _Record, groups: Mapping[int | None, tuple[int, ...]]) -> tuple[int, ...]:
    if record.global_ranks:
        members = tuple(record.global_ranks)
    elif record.pg_id in groups:
        members = groups[record.pg_id]
    else:
        raise ValueError(f"no init record creates process group {record.pg_id}, and the record lists no ranks")
    if record.root is not None and record.root not in members:
        raise ValueError(f"root {record.root} is not in its group, {list(members)}")
    return members


def _sizes(record: _Record) -> tuple[int, int, int]:
    if record.in_msg_size is None or record.out_msg_size is None or record.dtype is None:
        raise ValueError(f"{record.comms} needs in_msg_size, out_msg_size and dtype")
    if record.dtype.lower() not in ITEM_BYTES:
        raise ValueError(f'unknown data type "{record.dtype}"')
    if record.in_msg_size < 0 or record.out_msg_size < 0:
        raise ValueError("sizes cannot be negative")
    item = ITEM_BYTES[record.dtype.lower()]
    return record.in_msg_size * item, record.out_msg_size * item, item


def _message(number: int, record: _Record, rank: int | None, size: int, *, sends: bool) -> Part | tuple[str, bool]:
    if record.src_rank is None or record.dst_rank is None:
        raise ValueError(f"{record.comms} needs src_rank and dst_rank")
    if min(record.src_rank, record.dst_rank) < 0:
        return f"{record.comms} from rank {record.src_rank} to rank {record.dst_rank}: there is no such rank", True
    owner = record.src_rank if sends else record.dst_rank
    if rank is not None and owner != rank:
        raise ValueError(f"{record.comms} of rank {owner} in the trace of rank {rank}")
    if record.src_rank == record.dst_rank or size <= 0:
        return f"{record.comms} of 0 bytes, or to its own sender; skipped", False
    members = (record.src_rank, record.dst_rank)
    return Part(record=number, collective="p2p", members=members, size_bytes=size, root=owner, dtype=record.dtype)


def _split(split: Sequence[int] | None, size_bytes: int, item: int, count: int) -> tuple[int, ...]:
    """Return the bytes for each member; equal shares if the trace does not say."""
    if not split:
        share, more = divmod(size_bytes // item, count)
        return tuple((share + (index < more)) * item for index in range(count))
    if len(split) != count:
        raise ValueError(f"the split has {len(split)} parts, but the group has {count} ranks")
    if any(part < 0 for part in split):
        raise ValueError("a split cannot have negative parts")
    return tuple(part * item for part in split)


def content_for(trace: Trace, rank: int) -> bytes:
    """Return the content of one rank's file."""
    groups = {tuple(range(trace.ranks)): 0}
    for operation in trace.operations:
        if operation.collective != "p2p":
            groups.setdefault(operation.members, len(groups))
    records: list[dict[str, Any]] = [
        {"comms": "init", "pg_id": number, "req": -1, "global_ranks": list(members), "world_size": len(members)}
        for members, number in groups.items()
    ]
    mine = [operation for operation in trace.operations if rank in operation.members]
    for request, operation in enumerate(mine):
        records.append(
            {**_written(operation, rank, groups), "req": request, "startTime_ns": _start_ns(operation, rank)}
        )
    return json.dumps(records, indent=1).encode() + b"\n"


def _start_ns(operation: Operation, rank: int) -> int:
    return operation.not_before_ns[operation.members.index(rank)]


def _written(operation: Operation, rank: int, groups: Mapping[tuple[int, ...], int]) -> dict[str, Any]:
    dtype = DTYPES.get(operation.dtype or "fp32", "float32")
    item = ITEM_BYTES[dtype]
    place, count = operation.members.index(rank), len(operation.members)
    whole = operation.size_bytes // item
    if operation.collective == "p2p":
        src, dst = operation.members
        direction = "send" if rank == src else "recv"
        sizes = {"in_msg_size": whole, "out_msg_size": whole, "dtype": dtype}
        return {"comms": direction, **sizes, "src_rank": src, "dst_rank": dst, "use_batch": False, "pg_id": 0}
    frame = {"comms": WRITTEN[operation.collective], "pg_id": groups[operation.members], "world_size": count}
    if operation.collective == "barrier":
        return frame
    sent = received = whole
    if operation.collective == "all-gather":
        sent = whole // count
    elif operation.collective == "reduce-scatter":
        received = whole // count
    elif operation.collective == "all-to-allv":
        sends = [size // item for size in operation.counts[place]]
        receives = [row[place] // item for row in operation.counts]
        sent, received = sum(sends), sum(receives)
        frame |= {"in_split": sends, "out_split": receives}
    if operation.root is not None:
        frame["root"] = operation.root
    return {**frame, "in_msg_size": sent, "out_msg_size": received, "dtype": dtype}
