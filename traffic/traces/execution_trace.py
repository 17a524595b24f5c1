"""PyTorch execution traces: the JSON that ExecutionTraceObserver writes, read as records of a PARAM comms trace.

`{"schema": "1.1.0-chakra.0.0.4", "nodes": [{"id", "name", "inputs": {"values", "types"}, "outputs", "attrs"}]}`. Nodes
named `record_param_comms` are communication, and one named `## process_group:init ##` lists the groups. The inputs of
the former are: tensors (unless there is none), request, group, rank or peer, name, in_split, out_split, first rank of
the group, its stride, its size. Since schema 1.1.0 attributes repeat most of it. Source: facebookresearch/param,
et_replay/comm/commsTraceParser.py and execution_trace.py; PyTorch's ParamCommsUtils.hpp.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from faultbed.testbed.errors import ConfigError

__all__ = ["records"]

_COMMUNICATION, _GROUPS = "record_param_comms", "process_group:init"
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_WITHOUT_DATA = ("wait", "barrier", "init")
_DTYPES = {
    "c10half": "half",
    "c10bfloat16": "bfloat16",
    "longint": "long",
    "unsignedchar": "byte",
    "signedchar": "char",
}


def records(file: str, trace: Mapping[str, Any], *, rank: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the identifier of each node of communication, and the PARAM record that says the same.

    Raises:
        ConfigError: the trace has no such node, or one cannot be read; the message names it.
    """
    nodes = [node for node in trace["nodes"] if isinstance(node, Mapping)]
    groups = _groups(file, nodes)
    found = [node for node in nodes if node.get("name") == _COMMUNICATION]
    if not found:
        raise ConfigError(
            f"{file}: none of the {len(nodes):,} nodes of this execution trace is {_COMMUNICATION}: it was recorded "
            "without communication, and there is nothing to replay"
        )
    for node in found:
        number = node.get("id")
        try:
            yield int(node["id"]), _record(node, groups, rank)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{file}: node {number}: not a {_COMMUNICATION} that can be read ({type(error).__name__}: {error}); "
                "record the trace again, or leave the node out"
            ) from error


def _groups(file: str, nodes: list[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return the ranks of each group by its name. A list of all ranks is empty in the trace."""
    for node in nodes:
        if _GROUPS in str(node.get("name")):
            try:
                listed = json.loads(node["inputs"]["values"][0])
                return {str(one["pg_name"]): list(one["ranks"]) or list(range(one["group_size"])) for one in listed}
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"{file}: node {node.get('id')}: its list of process groups cannot be read ({error}); it may have "
                    "been cut when it was recorded"
                ) from error
    return {}


def _record(node: Mapping[str, Any], groups: Mapping[str, list[int]], rank: int | None) -> dict[str, Any]:
    values, types = node["inputs"]["values"], node["inputs"]["types"]
    said = {one["name"]: one["value"] for one in node.get("attrs", ()) if isinstance(one, Mapping)}
    # Without tensors the first input is the request: a number, or a number and whether it is point-to-point.
    has_tensors = not isinstance(values[0], int) and not (len(values[0]) == 2 and isinstance(values[0][1], bool))  # noqa: PLR2004
    base = 1 if has_tensors else 0
    group, peer, name = values[base + 1], values[base + 2], str(said.get("collective_name") or values[base + 3])
    ranks = _ranks(group, values[base + 6 :], groups)
    record: dict[str, Any] = {"comms": name, "world_size": len(ranks) or None, "global_ranks": ranks or None}
    if name.lower() in _WITHOUT_DATA:
        return record
    tensors = values[0] if has_tensors else []
    results = node["outputs"]["values"]
    record |= {
        "in_msg_size": int(said.get("in_msg_nelems", _elements(tensors))),
        "out_msg_size": int(said.get("out_msg_nelems", _elements(results))),
        "dtype": _dtype(str(said.get("dtype") or types[0])),
        "in_split": _split(said.get("in_split_size", values[base + 4])),
        "out_split": _split(said.get("out_split_size", values[base + 5])),
    }
    if name.lower() in _ROOTED:
        record["root"] = ranks[peer]
    if "send" in name.lower() or "recv" in name.lower():
        # Only the peer is recorded, as a rank of the group: the file's own rank comes from its name.
        ends = (rank, ranks[peer]) if "send" in name.lower() else (ranks[peer], rank)
        record |= {"src_rank": -1 if ends[0] is None else ends[0], "dst_rank": -1 if ends[1] is None else ends[1]}
    return record


def _ranks(group: Any, rest: list[Any], groups: Mapping[str, list[int]]) -> list[int]:
    """Return the ranks of a group, from the list of groups, or else from its first rank, stride and size."""
    name = str(group[0]) if isinstance(group, list) else str(group)
    if name in groups:
        return groups[name]
    if len(rest) >= 3 and rest[0] >= 0 and rest[2] > 0:  # noqa: PLR2004 - start, stride and size; -1: not known
        return [rest[0] + max(1, rest[1]) * index for index in range(min(rest[2], 1 << 17))]
    return []


def _elements(container: Any) -> int:
    """Return the elements of all tensors in nested lists: [id, storage, offset, elements, bytes, device] each."""
    if isinstance(container, list) and len(container) == 6 and isinstance(container[-1], str):  # noqa: PLR2004
        return int(container[3])
    return sum(_elements(one) for one in container) if isinstance(container, list) else 0


def _dtype(text: str) -> str:
    """Return the data type of `Float`, `Tensor(float)` or `GenericList[Tensor(c10::Half)]`."""
    inner = text.rpartition("(")[2].partition(")")[0] if "(" in text else text
    word = "".join(letter for letter in inner.lower() if letter.isalnum() or letter == "_")
    return _DTYPES.get(word, word)


def _split(value: Any) -> list[int] | None:
    listed = json.loads(value) if isinstance(value, str) else value
    return [int(one) for one in listed] or None
