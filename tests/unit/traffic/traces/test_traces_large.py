"""Large traces take at most 20 times their size in memory."""

import json
import tracemalloc
from pathlib import Path

import pytest
from google.protobuf.json_format import MessageToJson

from faultbed.traffic import traces
from faultbed.traffic.traces import chakra_messages as wire

NODES, MOST_TIMES_SIZE = 1000, 20
RECORDED = Path(__file__).parents[3] / "data" / "traces" / "ranking.json"


def node(number):
    after = [number - 1] if number else []
    return wire.new(
        "Node", id=number, name="all", type=wire.COLL, data_deps=after, attr={"comm_type": 0, "comm_size": 64}
    )


def param():
    first, *rest = json.loads(RECORDED.read_text())
    return json.dumps([first, *rest * (NODES // len(rest))]).encode()


def chakra():
    return wire.written_stream([wire.new("GlobalMetadata", version=b"0.0.4"), *map(node, range(NODES))])


def jsonizer():
    printed = (json.dumps({**json.loads(MessageToJson(node(number))), "type": 7}) for number in range(NODES))
    return ('{"version": "0.0.4"}' + "".join(printed)).encode()


def feeder():
    common = {"Name": "all", "NodeType": 7, "comm_type": 0, "comm_size": 64}
    graph = [{"Id": number, "data_deps": [number - 1] if number else [], **common} for number in range(NODES)]
    return json.dumps({"workload_graph": graph}).encode()


@pytest.mark.parametrize(
    ("name", "made"), [("0.json", param), ("a.0.et", chakra), ("b.0.json", jsonizer), ("c.0.json", feeder)]
)
def test_large_trace_takes_a_bounded_multiple_of_its_size(tmp_path, name, made):
    file = tmp_path / name
    file.write_bytes(made())
    traces.load(file, ranks=4, mirror=True)  # imports
    tracemalloc.start()
    try:
        trace = traces.load(file, ranks=4, mirror=True)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(trace.operations) > NODES // 2
    assert most < MOST_TIMES_SIZE * file.stat().st_size
