"""The messages of a Chakra execution trace, and the stream format in which they are stored.

Chakra's tools print the same messages as JSON: its jsonizer one object after the other (protobuf's JSON mapping), its
feeder reads `{"workload_graph": [{"Id", "Name", "NodeType", "runtime", "data_deps", "comm_type", ...}]}` (src/jsonizer,
src/feeder/JSONNode.cpp; `runtime` is in microseconds as `duration_micros` is).

The protobuf library builds the descriptor at run time from the field numbers of mlcommons/chakra
schema/protobuf/et_def.proto, without generated code or a compiler. Enumerations are declared as numbers, which is the
same on the wire. The version is declared as bytes, because its field held an attribute before 0.0.4. A trace is one
GlobalMetadata followed by Nodes, each preceded by its length as a varint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.message import DecodeError, Message

from faultbed.testbed.errors import ConfigError

__all__ = [
    "COLL",
    "COMP",
    "METADATA",
    "RECV",
    "SEND",
    "attributes",
    "is_json",
    "new",
    "read_json",
    "read_stream",
    "written_stream",
]

METADATA, COMP, SEND, RECV, COLL = 1, 4, 5, 6, 7
"""Values of NodeType."""

NODE_TYPES = (
    "INVALID_NODE", "METADATA_NODE", "MEM_LOAD_NODE", "MEM_STORE_NODE", "COMP_NODE", "COMM_SEND_NODE", "COMM_RECV_NODE",
    "COMM_COLL_NODE",
)  # fmt: skip
"""Names of NodeType by their numbers, as JSON has them."""
PACKAGE = "ChakraProtoMsg"
SCALARS = (
    "double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64",
    "fixed32", "fixed64", "sfixed32", "sfixed64", "bool", "string", "bytes",
)  # fmt: skip
FIRST_VALUE = 3
MESSAGES: dict[str, tuple[tuple[str, int, str, bool], ...]] = {
    "IOInfo": (("values", 1, "string", False), ("shapes", 2, "string", False), ("types", 3, "string", False)),
    "GlobalMetadata": (("version", 1, "bytes", False), ("attr", 2, "AttributeProto", True)),
    "Node": (
        ("id", 1, "uint64", False),
        ("name", 2, "string", False),
        ("type", 3, "int32", False),
        ("ctrl_deps", 4, "uint64", True),
        ("data_deps", 5, "uint64", True),
        ("start_time_micros", 6, "uint64", False),
        ("duration_micros", 7, "uint64", False),
        ("inputs", 8, "IOInfo", False),
        ("outputs", 9, "IOInfo", False),
        ("attr", 10, "AttributeProto", True),
    ),
}
"""Fields of each message: name, number, type, and whether it is repeated."""

_SPACE, _BEGIN = re.compile(r"\s*"), re.compile(rb'\s*\{\s*["}]')
MAX_VARINT_BYTES = 10
MAX_MESSAGE_BYTES = 1 << 30


def _field(message: Any, name: str, number: int, type_: str, *, repeated: bool) -> Any:
    kinds = descriptor_pb2.FieldDescriptorProto
    field = message.field.add(name=name, number=number, label=3 if repeated else 1)
    if type_ in SCALARS:
        field.type = kinds.Type.Value(f"TYPE_{type_.upper()}")
    else:
        field.type, field.type_name = kinds.Type.Value("TYPE_MESSAGE"), f".{PACKAGE}.{type_}"
    return field


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package=PACKAGE, syntax="proto3")
    for kind in SCALARS:
        _field(file.message_type.add(name=f"{kind.capitalize()}List"), "values", 1, kind, repeated=True)
    attribute = file.message_type.add(name="AttributeProto")
    _field(attribute, "name", 1, "string", repeated=False)
    _field(attribute, "doc_string", 2, "string", repeated=False)
    attribute.oneof_decl.add(name="value")
    for index, kind in enumerate(SCALARS):
        for shift, (name, type_) in enumerate(((f"{kind}_val", kind), (f"{kind}_list", f"{kind.capitalize()}List"))):
            _field(attribute, name, FIRST_VALUE + 2 * index + shift, type_, repeated=False).oneof_index = 0
    for message, fields in MESSAGES.items():
        message_type = file.message_type.add(name=message)
        for name, number, type_, repeated in fields:
            _field(message_type, name, number, type_, repeated=repeated)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        for name in ("AttributeProto", *MESSAGES)
    }


_CLASSES = _classes()


def new(message_name: str, /, **fields: Any) -> Any:
    """Build a message. `attr` may map names to numbers, strings and booleans."""
    attr = fields.pop("attr", {})
    message = _CLASSES[message_name](**fields)
    for key, value in attr.items():
        kind = {bool: "bool", int: "int64", str: "string"}[type(value)]
        message.attr.add(name=key, **{f"{kind}_val": value})
    return message


def attributes(node: Any) -> dict[str, Any]:
    """Return the attributes of a node that have a value. List values are returned as lists."""
    values = {}
    for attr in node.attr:
        kind = attr.WhichOneof("value")
        if kind is not None:
            value = getattr(attr, kind)
            values[attr.name] = list(value.values) if kind.endswith("_list") else value
    return values


def read_stream(file: str, content: bytes) -> Iterator[Any]:
    """Yield the GlobalMetadata and all Nodes.

    Raises:
        ConfigError: the file is truncated or has other messages. The error numbers the nodes from 0.
    """
    at, number = 0, -1
    while at < len(content):
        record = "its GlobalMetadata" if number < 0 else f"record {number}"
        size, start = _varint(file, content, at, record)
        if start + size > len(content):
            raise ConfigError(
                f"{file}: the trace is truncated in {record}, at byte {at}: the message has {size} bytes, but "
                f"only {len(content) - start} are there; copy the whole file again"
            )
        message = _CLASSES["GlobalMetadata" if number < 0 else "Node"]()
        try:
            message.ParseFromString(content[start : start + size])
        except DecodeError as error:
            raise ConfigError(f"{file}: {record}, at byte {at}: not a Chakra message ({error})") from error
        yield message
        at, number = start + size, number + 1
    if number < 0:
        raise ConfigError(f"{file}: the file is empty, not a Chakra trace")


def is_json(content: bytes) -> bool:
    """Return whether a trace is text. A stream may begin with the same byte, as the length of its first message."""
    return _BEGIN.match(content) is not None


def read_json(file: str, content: bytes) -> Iterator[Any]:
    """Yield the Nodes of a trace in one of the two forms of JSON.

    Raises:
        ConfigError: the file is truncated, or an object is no node. The error numbers the nodes from 0.
    """
    for number, raw in enumerate(_objects(file, content)):
        where = f"{file}: record {number}"
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{where}: not an object, but {str(raw)[:40]!r}; not a Chakra trace")
        try:
            yield _of_feeder(raw) if "NodeType" in raw else _of_jsonizer(raw)
        except (json_format.ParseError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{where}: not a node of a Chakra trace ({error}); export the trace again") from error


def _objects(file: str, content: bytes) -> Iterator[Any]:
    try:
        text, at, decoder = content.decode().strip(), 0, json.JSONDecoder()
        while at < len(text):
            value, end = decoder.raw_decode(text, at)
            at = _SPACE.match(text, end).end()  # type: ignore[union-attr]  # it matches nothing, too
            if "workload_graph" in value:
                yield from value["workload_graph"]
            elif "id" in value or "name" in value:
                yield value
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{file}: not a Chakra trace in JSON ({error}); copy the whole file again") from error


def _of_jsonizer(raw: Mapping[str, Any]) -> Any:
    type_ = raw.get("type", 0)
    number = NODE_TYPES.index(type_) if type_ in NODE_TYPES else type_
    return json_format.ParseDict({**raw, "type": number}, _CLASSES["Node"](), ignore_unknown_fields=True)


def _of_feeder(raw: Mapping[str, Any]) -> Any:
    attr = {name: value for name, value in raw.items() if name.startswith(("comm_", "pg_name", "root"))}
    return new(
        "Node",
        id=raw["Id"],
        name=raw.get("Name", ""),
        type=raw["NodeType"],
        data_deps=raw.get("data_deps", []),
        ctrl_deps=raw.get("ctrl_deps", []),
        duration_micros=raw.get("runtime", 0),
        attr=attr,
    )


def _varint(file: str, content: bytes, at: int, record: str) -> tuple[int, int]:
    value = 0
    for index, byte in enumerate(content[at : at + MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * index)
        if not byte & 0x80:
            if value > MAX_MESSAGE_BYTES:
                break
            return value, at + index + 1
    if len(content) - at < MAX_VARINT_BYTES:
        raise ConfigError(f"{file}: the trace is truncated in {record}, at byte {at}; copy the whole file again")
    raise ConfigError(f"{file}: {record}, at byte {at}: the message length is impossible; not a Chakra trace")


def written_stream(messages: Iterable[Message]) -> bytes:
    """Return the bytes of a trace."""
    stream = bytearray()
    for message in messages:
        data = message.SerializeToString()
        size = len(data)
        while size > 0x7F:  # noqa: PLR2004
            stream.append(size & 0x7F | 0x80)
            size >>= 7
        stream.append(size)
        stream += data
    return bytes(stream)
