"""Chakra execution traces: one file per rank, `<name>.<rank>.et`, each a graph of the rank's compute and communication.

A communication node has `comm_type`, `comm_size` (bytes of the rank's input) and `pg_name`; messages have `comm_src`
and `comm_dst`. Groups are in the node `## process_group:init ##`, as PyTorch writes it, or in a separate file `{"name":
[ranks]}`, as in ASTRA-sim. Without `pg_name` all ranks take part. The graph is followed in one order that its
dependencies allow. The compute time before an operation is the longest path through the compute nodes before it.
Sources: mlcommons/chakra, schema/protobuf/et_def.proto, src/converter/pytorch_converter.py, src/feeder.
"""

from __future__ import annotations

import ast
import dataclasses
import heapq
import json
from collections.abc import Mapping, Sequence
from typing import Any

from faultbed.testbed.errors import ConfigError
from faultbed.traffic.traces import chakra_messages as wire
from faultbed.traffic.traces.trace import Note, Part, RankTrace, Trace, group_of

__all__ = ["Groups", "content_for", "read"]

Groups = Mapping[str, Sequence[int]]
VERSION = b"0.0.4"
GROUPS_NODE = "## process_group:init ##"
COMM_TYPES = (
    "all-reduce", "reduce", "all-gather", "gather", "scatter", "broadcast", "all-to-all", "reduce-scatter",
    "reduce-scatter", "barrier",
)  # fmt: skip
"""Collectives by the number of `comm_type`; the second reduce-scatter is REDUCE_SCATTER_BLOCK."""
UNSUPPORTED = ("gather", "scatter")
SKIPPED = {0: "an invalid node", 2: "a memory load", 3: "a memory store"}
BLOCKING = {8: "a storage node", 9: "a batch node", 10: "a checkpoint node"}
BARRIER_BYTES = 4


def read(file: str, content: bytes, *, rank: int, world: int, groups: Groups) -> RankTrace:
    """Read one rank's file.

    Raises:
        ConfigError: the file is truncated, is no Chakra trace, or has an invalid node; with the record number from 0.
    """
    if wire.is_json(content):
        nodes = list(wire.read_json(file, content))
    else:
        _, *nodes = wire.read_stream(file, content)
    known = {name: tuple(ranks) for name, ranks in groups.items()}
    for number, node in enumerate(nodes):
        if node.type == wire.METADATA and "process_group:init" in node.name:
            known = {**_groups_of(f"{file}: record {number}", node.inputs.values, world), **known}
    parts: list[Part] = []
    notes: list[Note] = []
    passed_ns = 0
    for number, ready_ns in _in_order(file, nodes):
        node = nodes[number]
        if node.type in (wire.COMP, wire.METADATA):
            continue
        if node.type == wire.COLL:
            converted = _collective(f"{file}: record {number}", number, node, rank, world, known)
        elif node.type in (wire.SEND, wire.RECV):
            converted = _message(number, node, rank, world)
        else:
            converted = _left_out(f"{file}: record {number}", node)
        if isinstance(converted, tuple):
            notes.append(Note(file=file, record=number, what=converted[0], blocks=converted[1]))
        else:
            parts.append(_with_times(converted, node, max(0, ready_ns - passed_ns)))
            passed_ns = max(passed_ns, ready_ns)
    return RankTrace(file=file, rank=rank, world=world, parts=tuple(parts), notes=tuple(notes))


def _left_out(where: str, node: Any) -> tuple[str, bool]:
    """Return the note about a node that is not replayed, and whether it blocks the replay.

    Raises:
        ConfigError: the type of the node is unknown.
    """
    if node.type in SKIPPED:
        return f"{SKIPPED[node.type]}, {node.name}: skipped", False
    if node.type in BLOCKING:
        return f"{BLOCKING[node.type]}, {node.name}: not supported", True
    raise ConfigError(f"{where}: unknown node type {node.type}")


def _with_times(part: Part, node: Any, pause_ns: int) -> Part:
    return dataclasses.replace(part, pause_ns=pause_ns, duration_ns=node.duration_micros * 1000)


def _groups_of(where: str, text: str, world: int) -> dict[str, tuple[int, ...]]:
    """Parse `['[{"pg_name": "0", "ranks": [], "group_size": 2, ...}]']`: a list printed by Python, containing JSON."""
    try:
        raw = json.loads(ast.literal_eval(text)[0]) if text.lstrip().startswith(("['", '["')) else json.loads(text)
        return {
            str(group["pg_name"]): group_of(group.get("ranks") or range(int(group.get("group_size") or world)))
            for group in raw
        }
    except (ValueError, SyntaxError, LookupError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{where}: the process groups are invalid: {error}") from error


def _in_order(file: str, nodes: Sequence[Any]) -> list[tuple[int, int]]:
    """Return record numbers in an order that the dependencies allow, with the compute time before each (ns)."""
    place = {node.id: number for number, node in enumerate(nodes)}
    if len(place) != len(nodes):
        raise ConfigError(f"{file}: two nodes have the same id")
    ready = [0] * len(nodes)
    waits = [0] * len(nodes)
    after: list[list[int]] = [[] for _ in nodes]
    for number, node in enumerate(nodes):
        for dependency in {*node.ctrl_deps, *node.data_deps}:
            if dependency not in place:
                raise ConfigError(
                    f"{file}: record {number} (node {node.id}) depends on node {dependency}, which is missing; the "
                    "trace may be truncated"
                )
            after[place[dependency]].append(number)
            waits[number] += 1
    free = [number for number, count in enumerate(waits) if not count]
    order = []
    while free:
        number = heapq.heappop(free)
        order.append((number, ready[number]))
        done_ns = ready[number] + (nodes[number].duration_micros * 1000 if nodes[number].type == wire.COMP else 0)
        for follower in after[number]:
            ready[follower] = max(ready[follower], done_ns)
            waits[follower] -= 1
            if not waits[follower]:
                heapq.heappush(free, follower)
    if len(order) < len(nodes):
        stuck = next(number for number, count in enumerate(waits) if count)
        raise ConfigError(f"{file}: record {stuck} (node {nodes[stuck].id}) depends on itself through a cycle of nodes")
    return order


def _collective(
    where: str, number: int, node: Any, rank: int, world: int, groups: Mapping[str, tuple[int, ...]]
) -> Part | tuple[str, bool]:
    attributes = wire.attributes(node)
    type_ = attributes.get("comm_type")
    if not isinstance(type_, int) or not 0 <= type_ < len(COMM_TYPES):
        raise ConfigError(f"{where} ({node.name}): unknown comm_type {type_}")
    kind = COMM_TYPES[type_]
    if kind in UNSUPPORTED:
        return f"{kind}, {node.name}: this collective is not supported", True
    name = str(attributes.get("pg_name", ""))
    if name and name not in groups:
        if groups or name != "0":
            raise ConfigError(
                f"{where} ({node.name}): the trace does not say which ranks are in process group {name}; give a "
                "file of groups"
            )
        name = ""
    members = groups[name] if name else tuple(range(world))
    size = BARRIER_BYTES if kind == "barrier" else int(attributes.get("comm_size", 0))
    if rank not in members:
        return f"{node.name} of process group {name}: rank {rank} is not a member; skipped", False
    if len(members) == 1 or size <= 0:
        return f"{node.name}: it has only one rank, or 0 bytes; skipped", False
    root = int(attributes.get("root", members[0])) if kind in ("broadcast", "reduce") else None
    if root is not None and root not in members:
        raise ConfigError(f"{where} ({node.name}): root {root} is not in its group, {list(members)}")
    whole = size * len(members) if kind == "all-gather" else size
    return Part(record=number, collective=kind, members=members, size_bytes=whole, root=root)


def _message(number: int, node: Any, rank: int, world: int) -> Part | tuple[str, bool]:
    attributes = wire.attributes(node)
    sends = node.type == wire.SEND
    src, dst = (rank, attributes.get("comm_dst")) if sends else (attributes.get("comm_src"), rank)
    size = int(attributes.get("comm_size", 0))
    if src is None or dst is None:
        return f"{node.name}: no {'destination' if sends else 'source'} is given", True
    if not (0 <= src < world and 0 <= dst < world):
        return f"{node.name}: there is no rank {dst if sends else src}", True
    if src == dst or size <= 0:
        return f"{node.name}: a message of 0 bytes, or to its own sender; skipped", False
    return Part(record=number, collective="p2p", members=(src, dst), size_bytes=size, root=rank)


def content_for(trace: Trace, rank: int) -> bytes:
    """Return the content of one rank's file: its compute and its communication in sequence.

    Raises:
        ConfigError: the format has no such collective.
    """
    all_ranks = tuple(range(trace.ranks))
    groups = {all_ranks: "0"}
    for operation in trace.operations:
        if operation.collective != "p2p":
            groups.setdefault(operation.members, str(len(groups)))
    listed_groups = [
        {
            "pg_name": name,
            "pg_desc": "",
            "backend_config": "",
            "ranks": list(members),
            "group_size": len(members),
            "group_count": len(groups),
        }
        for members, name in groups.items()
    ]
    listed = wire.new("IOInfo", values=str([json.dumps(listed_groups)]), shapes="[[]]", types="['String']")
    messages = [wire.new("GlobalMetadata", version=VERSION)]
    messages.append(wire.new("Node", id=0, name=GROUPS_NODE, type=wire.METADATA, inputs=listed))
    last, at_ns = 0, 0

    def add(name: str, type_: int, duration_ns: int, **attr: Any) -> None:
        nonlocal last, at_ns
        micros = {"start_time_micros": at_ns // 1000, "duration_micros": duration_ns // 1000}
        node = {"id": last + 1, "name": name, "type": type_, "data_deps": [last], **micros}
        messages.append(wire.new("Node", **node, attr={"is_cpu_op": False, **attr}))
        last, at_ns = last + 1, at_ns + duration_ns

    for operation in trace.operations:
        if rank not in operation.members:
            continue
        place = operation.members.index(rank)
        pause_ns = max(operation.pauses_ns[place], operation.not_before_ns[place] - at_ns)
        if pause_ns >= 1000:  # noqa: PLR2004  # the format counts in microseconds
            add("compute", wire.COMP, pause_ns)
        if operation.collective == "p2p":
            src, dst = operation.members
            type_ = wire.SEND if rank == src else wire.RECV
            name = f"{'send to' if rank == src else 'recv from'} {dst if rank == src else src}"
            add(
                name,
                type_,
                operation.duration_ns,
                comm_size=operation.size_bytes,
                comm_src=src,
                comm_dst=dst,
                comm_tag=0,
            )
            continue
        if operation.collective not in COMM_TYPES:
            raise ConfigError(f"a Chakra trace cannot contain {operation.collective}; write a PARAM trace")
        size = (
            operation.size_bytes // len(operation.members)
            if operation.collective == "all-gather"
            else operation.size_bytes
        )
        attr: dict[str, Any] = {
            "comm_type": COMM_TYPES.index(operation.collective),
            "pg_name": groups[operation.members],
        }
        attr |= {} if operation.collective == "barrier" else {"comm_size": size}
        attr |= {} if operation.root is None else {"root": operation.root}
        add(operation.collective, wire.COLL, operation.duration_ns, **attr)
    return wire.written_stream(messages)
