"""Chakra traces in JSON, and one rank's trace that stands for all ranks."""

import json
from pathlib import Path

import pytest
from google.protobuf.json_format import MessageToJson

from faultbed.testbed.errors import ConfigError, UsageError
from faultbed.traffic import traces
from faultbed.traffic.traces import chakra_messages as wire

TRACES = Path(__file__).parents[3] / "data" / "traces"
BINARY = TRACES / "tensor-parallel"


def as_jsonizer_prints(content):
    """Return a trace as Chakra's jsonizer writes it: messages by protobuf's JSON mapping, types by name."""
    metadata, *nodes = wire.read_stream("a.0.et", content)
    del metadata
    printed = ['{\n  "version": "0.0.4"\n}']
    for node in nodes:
        raw = json.loads(MessageToJson(node))
        printed.append(json.dumps({**raw, "type": wire.NODE_TYPES[node.type]}, indent=2))
    return "".join(printed)


@pytest.fixture
def folder(tmp_path):
    for file in sorted(BINARY.glob("*.et")):
        (tmp_path / file.with_suffix(".json").name).write_text(as_jsonizer_prints(file.read_bytes()))
    return tmp_path


def test_chakra_trace_of_the_jsonizer_is_the_trace_that_it_was_made_from(folder):
    binary, text = traces.load(BINARY), traces.load(folder)
    assert (text.format, text.operations) == ("chakra", binary.operations)


FEEDER = {
    "workload_graph": [
        {"Id": 0, "Name": "compute", "NodeType": 4, "is_cpu_op": False, "runtime": 5, "data_deps": []},
        {
            "Id": 1, "Name": "all", "NodeType": 7, "is_cpu_op": False, "data_deps": [0],
            "comm_type": 0, "comm_size": 4096, "comm_priority": 0,
        },
    ]
}  # fmt: skip


def test_chakra_trace_of_the_json_feeder_is_read_and_mirrored(tmp_path):
    file = tmp_path / "job.0.json"
    file.write_text(json.dumps(FEEDER))
    (operation,) = traces.load(file, ranks=3, mirror=True).operations
    assert (operation.collective, operation.members, operation.size_bytes) == ("all-reduce", (0, 1, 2), 4096)
    assert operation.pauses_ns == (5000, 5000, 5000)
    with pytest.raises(UsageError, match=r"one file per rank.*--mirror"):
        traces.load(file, ranks=3)


DAMAGE = {
    "cut": lambda text: text[: len(text) // 2],
    "type": lambda text: text.replace('"NodeType": 7', '"NodeType": "x"'),
    "size": lambda text: text.replace('"comm_size": 4096', '"comm_size": null'),
    "dependency": lambda text: text.replace("[0]", "[NaN]"),
    "more": lambda text: text + "[",
    "number": lambda text: '{"workload_graph": 3}' + text,
    "no object": lambda text: '{"workload_graph": [3]}' + text,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_chakra_trace_in_json_is_refused(tmp_path, name):
    (tmp_path / "0.json").write_text(DAMAGE[name](json.dumps(FEEDER)))
    with pytest.raises(ConfigError, match=r"0\.json"):
        traces.load(tmp_path / "0.json", ranks=2, mirror=True)


def test_one_rank_of_a_folder_is_mirrored_and_a_folder_of_several_is_refused(folder, tmp_path):
    one = min(BINARY.glob("*.et"))
    mirrored = traces.load(one, ranks=4, mirror=True)
    whole = traces.load(BINARY)
    assert [o.collective for o in mirrored.operations] == [o.collective for o in whole.operations if 0 in o.members]
    with pytest.raises(UsageError, match="files of 4 ranks; --mirror takes one"):
        traces.load(BINARY, ranks=4, mirror=True)
    with pytest.raises(UsageError, match="not param"):
        traces.load(folder, form="param")


def test_trace_whose_files_have_two_formats_needs_the_one_to_read(folder):
    (folder / "9.json").write_text("[]")
    with pytest.raises(UsageError, match="two formats"):
        traces.load(folder)
    assert traces.load(folder, form="chakra").ranks == 4
