"""Public trace formats are read unchanged, written so that other tools can read them, or refused in one sentence."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

import pytest
from house import TRACES
from hypothesis import given
from hypothesis import strategies as st
from made_traces import by_rank, drawn_trace, operations

from faultbed.testbed.errors import ConfigError, UsageError
from faultbed.traffic import traces
from faultbed.traffic.traces import Operation, Trace, chakra, param
from faultbed.traffic.traces import chakra_messages as wire

ALL = (0, 1, 2, 3)


def summary(trace):
    return [(operation.collective, operation.members, operation.size_bytes) for operation in trace.operations]


def test_param_trace_for_all_ranks_converts_elements_to_bytes():
    trace = traces.load(TRACES / "ranking.json")
    assert summary(trace) == [
        ("all-to-allv", ALL, 16384 * 4),
        ("reduce-scatter", ALL, 32768 * 2),
        ("all-gather", ALL, 32768 * 2),
        ("broadcast", ALL, 1024 * 4),
        ("all-reduce", ALL, 65536 * 4),
        ("barrier", ALL, 4),
    ]
    assert trace.operations[0].counts == ((16384,) * 4,) * 4
    assert trace.operations[3].root == 2
    assert [operation.not_before_ns[0] // 1_000_000 for operation in trace.operations] == [0, 20, 30, 32, 40, 50]
    assert [(note.record, note.blocks) for note in trace.notes] == [(3, False)]


def test_param_traces_of_ranks_join_by_group_with_crossing_messages():
    assert summary(traces.load(TRACES / "pipeline")) == [
        ("all-reduce", (0, 1), 16384),
        ("all-reduce", (2, 3), 16384),
        ("p2p", (0, 2), 32768),
        ("p2p", (2, 0), 32768),
        ("p2p", (1, 3), 32768),
        ("p2p", (3, 1), 32768),
        ("all-reduce", ALL, 16384),
    ]


def test_chakra_trace_written_by_protoc_follows_its_graph():
    """The files were written with protoc's classes of et_def.proto, as Chakra's generator does."""
    trace = traces.load(TRACES / "tensor-parallel")
    assert summary(trace) == [
        ("all-reduce", (0, 1), 32768),
        ("all-reduce", (2, 3), 32768),
        ("reduce-scatter", ALL, 65536),
        ("all-gather", ALL, 4 * 16384),
        ("p2p", (0, 2), 8192),
        ("all-to-all", ALL, 16384),
        ("barrier", ALL, 4),
    ]
    pauses = [operation.pauses_ns for operation in trace.operations]
    assert pauses[0] == (2_000_000, 2_000_000), "the longer one of two ways through compute"
    assert pauses[4] == (1_000_000, 1_000_000)
    assert pauses[5] == (0, 1_000_000, 0, 1_000_000), "what is before a message is not before what follows it again"
    assert trace.operations[0].duration_ns == 900_000
    assert {note.what for note in trace.notes} == {"a memory load, weights: skipped"}


@given(rows=operations, form=st.sampled_from(traces.FORMATS))
def test_saved_trace_loads_with_the_same_operations(rows, form, tmp_path_factory):
    trace = drawn_trace(rows)
    folder = tmp_path_factory.mktemp("trace")
    traces.save(trace, folder / "t", form=form)
    again = traces.load(folder / "t")
    assert (again.ranks, again.format, again.notes) == (4, form, ())
    for rank in range(4):
        assert by_rank(again, rank) == by_rank(trace, rank)
        want = [o.not_before_ns[o.members.index(rank)] for o in trace.operations if rank in o.members]
        mine = [o for o in again.operations if rank in o.members]
        if form == "param":
            assert [o.not_before_ns[o.members.index(rank)] for o in mine] == want
        else:  # pauses in whole microseconds, and the times of the operations
            now, times = 0, []
            for one in mine:
                now += one.pauses_ns[one.members.index(rank)]
                times.append(now)
                now += one.duration_ns
            assert times == want


def test_all_to_allv_splits_survive_param_and_are_rejected_by_chakra(tmp_path):
    counts = ((0, 8), (4, 16))
    one = Operation(
        record=0, collective="all-to-allv", members=(0, 1), size_bytes=24, counts=counts, pauses_ns=(0, 0),
        not_before_ns=(0, 0), dtype="int32",
    )  # fmt: skip
    trace = Trace(source="made", format="recorded", ranks=2, operations=(one,))
    traces.save(trace, tmp_path / "p", form="param")
    assert traces.load(tmp_path / "p").operations[0].counts == counts
    with pytest.raises(ConfigError, match="cannot contain all-to-allv; write a PARAM trace"):
        traces.save(trace, tmp_path / "c", form="chakra")
    assert not (tmp_path / "c").exists()
    with pytest.raises(UsageError, match="not an empty folder"):
        traces.save(trace, tmp_path / "p", form="param")


# Truncated, wrong and missing files.


@given(share=st.floats(0, 0.999))
def test_truncated_chakra_file_is_refused_or_shorter(share):
    """A cut between two nodes cannot be detected, unless another node depends on a missing one."""
    content = (TRACES / "tensor-parallel" / "layer.0.et").read_bytes()
    whole = list(wire.read_stream("whole", content))
    try:
        actual = list(wire.read_stream("job.0.et", content[: int(len(content) * share)]))
    except ConfigError as error:
        assert "job.0.et: " in str(error)
        assert "truncated in" in str(error) or "empty" in str(error)
    else:
        assert actual == whole[: len(actual)]


@given(share=st.floats(0, 0.99))
def test_truncated_param_file_is_refused(share):
    content = (TRACES / "ranking.json").read_bytes()
    with pytest.raises(ConfigError, match=r"r\.json: the trace is truncated"):
        param.read("r.json", content[: int(len(content.rstrip()) * share)].rstrip(b"]}\n"), rank=None, world=4)


def test_truncated_gzip_file_is_refused(tmp_path):
    (tmp_path / "t.json.gz").write_bytes(gzip.compress((TRACES / "ranking.json").read_bytes())[:200])
    with pytest.raises(ConfigError, match="truncated"):
        traces.load(tmp_path / "t.json.gz")
    (tmp_path / "u.json.gz").write_bytes(gzip.compress((TRACES / "ranking.json").read_bytes()))
    assert summary(traces.load(tmp_path / "u.json.gz")) == summary(traces.load(TRACES / "ranking.json"))


REDUCE = {"comms": "all_reduce", "in_msg_size": 4, "out_msg_size": 4, "dtype": "float32", "world_size": 2}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({**REDUCE, "dtype": "float8"}, 'record 1: unknown data type "float8"'),
        ({"comms": "all_reduce", "world_size": 2}, "record 1: all_reduce needs in_msg_size"),
        ({**REDUCE, "in_msg_size": "many"}, "record 1: Expected `int"),
        ({**REDUCE, "in_msg_size": -1}, "record 1: sizes cannot be negative"),
        ({**REDUCE, "pg_id": 7}, "record 1: no init record creates process group 7"),
        ({**REDUCE, "comms": "broadcast", "root": 5}, r"record 1: root 5 is not in its group, \[0, 1\]"),
        (
            {**REDUCE, "comms": "all_to_allv", "in_split": [1, 2, 1]},
            "record 1: the split has 3 parts, but the group has 2 ranks",
        ),
        ({**REDUCE, "comms": "send"}, "record 1: send needs src_rank and dst_rank"),
        ({"markers": []}, "record 1: the record has neither comms nor compute"),
        ({**REDUCE, "global_ranks": [0, 0, 1]}, r"record 1: the group \[0, 0, 1\] has a rank twice"),
        ({**REDUCE, "global_ranks": [-1, 0]}, r"record 1: the group \[-1, 0\] has -1, which is no rank"),
        (
            {"comms": "init", "pg_id": 3, "global_ranks": [0, 1 << 40]},
            "record 1: the group .* has 1099511627776, which",
        ),
        ({**REDUCE, "world_size": 10**9}, "record 1: 1,000,000,000 ranks; at most 131,072 are read"),
        ({**REDUCE, "comms": "send", "src_rank": 0, "dst_rank": 10**9}, "record 1: 1,000,000,001 ranks"),
    ],
)
def test_invalid_param_record_is_rejected_with_its_number(record, message):
    with pytest.raises(ConfigError, match=f"t.json: {message}"):
        param.read("t.json", json.dumps([REDUCE, record]).encode(), rank=None, world=None)


def test_param_message_of_a_negative_rank_is_noted_as_blocking():
    """Rank -1 used to be taken for the last rank."""
    record = {**REDUCE, "comms": "send", "src_rank": -1, "dst_rank": 0}
    read = param.read("t.json", json.dumps([REDUCE, record]).encode(), rank=None, world=None)
    assert [(note.record, note.blocks) for note in read.notes] == [(1, True)]
    assert [part.collective for part in read.parts] == ["all-reduce"]


def test_param_group_of_one_record_counts_for_the_number_of_ranks():
    """A group that only its own record lists used to end the replay with an IndexError."""
    record = {**REDUCE, "global_ranks": [0, 3]}
    read = param.read("t.json", json.dumps([REDUCE, record]).encode(), rank=None, world=None)
    assert read.world == 4
    assert [part.members for part in read.parts] == [ALL, (0, 3)]


def test_unsupported_param_record_is_noted_as_blocking():
    content = json.dumps([REDUCE, {**REDUCE, "comms": "gather"}, {"comms": "wait", "req": 0}]).encode()
    (note,) = param.read("t.json", content, rank=None, world=None).notes
    assert (note.record, note.what, note.blocks) == (1, "gather: this collective is not supported", True)
    with pytest.raises(ConfigError, match="no record gives the number of ranks"):
        param.read("t.json", b'[{"comms": "barrier"}]', rank=None, world=None)
    with pytest.raises(ConfigError, match="recorded without communication"):
        param.read("t.json", b'{"schema": "1.1.1", "nodes": []}', rank=None, world=None)


def written(*nodes):
    return wire.written_stream([wire.new("GlobalMetadata", version=b"0.0.4"), *nodes])


def node(number, kind=wire.COLL, deps=(), **attr):
    return wire.new("Node", id=number, name=f"n{number}", type=kind, data_deps=deps, attr=attr)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (
            [node(1, comm_type=0, comm_size=8, pg_name="tp")],
            "record 0 .n1.: the trace does not say which ranks are in process",
        ),
        ([node(1, comm_type=99)], "unknown comm_type 99"),
        ([node(1)], "unknown comm_type None"),
        ([node(1, deps=[5])], "record 0 .node 1. depends on node 5, which is missing"),
        ([node(1, deps=[2]), node(2, deps=[1])], "record 0 .node 1. depends on itself"),
        ([node(1), node(1)], "same id"),
        ([node(1, kind=77)], "unknown node type 77"),
    ],
)
def test_invalid_chakra_node_is_rejected_with_its_record(nodes, message):
    with pytest.raises(ConfigError, match=f"j.0.et: .*{message}|j.0.et: {message}"):
        chakra.read("j.0.et", written(*nodes), rank=0, world=2, groups={})


def test_chakra_nodes_that_cannot_be_replayed_are_noted():
    nodes = [node(1, kind=wire.SEND, comm_size=8), node(2, comm_type=3, comm_size=8), node(3, kind=10)]
    notes = chakra.read("j.0.et", written(*nodes), rank=0, world=2, groups={}).notes
    assert [(note.record, note.blocks) for note in notes] == [(0, True), (1, True), (2, True)]
    assert "no destination is given" in notes[0].what


def test_chakra_groups_load_from_a_file(tmp_path):
    for rank in range(2):
        (tmp_path / f"j.{rank}.et").write_bytes(written(node(1, comm_type=0, comm_size=64, pg_name="tp")))
    (tmp_path / "groups").write_text('{"tp": [0, 1]}')
    assert summary(traces.load(tmp_path, groups=tmp_path / "groups")) == [("all-reduce", (0, 1), 64)]


@pytest.mark.parametrize("ranks", ['["0", "1"]', "[0, 0, 1]", "[-1, 0]"])
def test_chakra_groups_that_are_none_are_refused(ranks):
    """A group of texts used to have no member, so that its collectives were left out."""
    groups = wire.new("IOInfo", values=f'[{{"pg_name": "tp", "ranks": {ranks}}}]', shapes="[[]]", types="['String']")
    content = wire.written_stream(
        [
            wire.new("GlobalMetadata", version=chakra.VERSION),
            wire.new("Node", id=0, name=chakra.GROUPS_NODE, type=wire.METADATA, inputs=groups),
            wire.new("Node", id=1, name="n", type=wire.COLL, attr={"comm_type": 0, "comm_size": 64, "pg_name": "tp"}),
        ]
    )
    with pytest.raises(ConfigError, match=r"j.0.et: record 0: the process groups are invalid: the group "):
        chakra.read("j.0.et", content, rank=0, world=2, groups={})


def test_traces_that_wait_for_each_other_are_refused_with_their_records(tmp_path):
    other = {**REDUCE, "comms": "barrier"}
    (tmp_path / "0.json").write_text(json.dumps([REDUCE, other]))
    (tmp_path / "1.json").write_text(json.dumps([other, REDUCE]))
    with pytest.raises(ConfigError, match=r"0.json record 0 .all-reduce.*1.json record 0 .barrier"):
        traces.load(tmp_path)
    (tmp_path / "1.json").write_text(json.dumps([{**REDUCE, "in_msg_size": 8}, other]))
    with pytest.raises(ConfigError, match="sizes of one all-reduce differ: 16, 32 bytes"):
        traces.load(tmp_path)
    (tmp_path / "1.json").rename(tmp_path / "2.json")
    with pytest.raises(ConfigError, match="rank 1 has no file"):
        traces.load(tmp_path)


def test_traces_whose_roots_differ_are_refused(tmp_path):
    """Ranks 0 and 1 each name themselves as the root, so the trace does not describe a possible run."""
    for rank in range(2):
        record = {"comms": "broadcast", "in_msg_size": 4, "out_msg_size": 4, "dtype": "float32", "root": rank}
        (tmp_path / f"{rank}.json").write_text(json.dumps([{**record, "world_size": 2}]))
    with pytest.raises(ConfigError, match="roots of one broadcast differ: 0 in rank 0's, 1 in rank 1's"):
        traces.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "no such trace"),
        ("tensor-parallel/layer.0.et", "name their folder"),
        ("../..", "no file in the folder is named"),
    ],
)
def test_load_of_a_path_without_a_trace_is_refused(name, message):
    with pytest.raises(UsageError, match=message):
        traces.load(TRACES / name)


# Traces of other sizes, adapted to the lab.


def test_fitted_keeps_operations_among_the_first_ranks():
    trace = traces.fitted(traces.load(TRACES / "tensor-parallel"), ranks=2)
    assert summary(trace) == [
        ("all-reduce", (0, 1), 32768),
        ("reduce-scatter", (0, 1), 32768),
        ("all-gather", (0, 1), 2 * 16384),
        ("all-to-all", (0, 1), 8192),
        ("barrier", (0, 1), 4),
    ]
    with pytest.raises(UsageError, match="no operation is among its first 1 ranks"):
        traces.fitted(trace, ranks=1)


@given(rows=operations, scale=st.floats(1e-4, 10))
def test_fitted_sizes_are_divisible_and_above_zero(rows, scale):
    for one in traces.fitted(drawn_trace(rows), ranks=4, scale=scale).operations:
        assert one.size_bytes > 0
        assert one.size_bytes % 4 == 0
        if one.collective in ("all-to-all", "all-gather", "reduce-scatter"):
            assert one.size_bytes % (4 * len(one.members)) == 0
    with pytest.raises(UsageError, match="above 0"):
        traces.fitted(drawn_trace(rows), ranks=4, scale=0)


@pytest.mark.parametrize(("size_bytes", "scale"), [(10**400, 1.0), (1024, 1e308)], ids=["size", "scale"])
def test_fitted_size_that_is_no_number_of_bytes_is_refused(size_bytes, scale):
    """Such a size used to be an internal error."""
    one = dataclasses.replace(traces.load(TRACES / "ranking.json").operations[4], size_bytes=size_bytes)
    with pytest.raises(UsageError, match="t: record 7: the size of this all-reduce"):
        traces.fitted(Trace(source="t", format="param", ranks=4, operations=(one,)), ranks=4, scale=scale)


def test_fitted_all_to_allv_keeps_its_skew():
    one = traces.load(TRACES / "ranking.json").operations[0]
    skewed = dataclasses.replace(one, counts=tuple((1000, 400, 0, 40) for _ in ALL))
    trace = Trace(source="t", format="param", ranks=4, operations=(skewed,))
    (cut,) = traces.fitted(trace, ranks=4, scale=0.1).operations
    assert cut.counts[0] == (100, 40, 0, 4)
    assert cut.size_bytes == 400, "the busiest receiver"


def comm_node(number, name, values, *, attrs=(), elements=1024):
    """Return a node of communication as PyTorch's ExecutionTraceObserver writes it (schema 1.1.0)."""
    tensors = [[[3, 4, 0, elements, 4, "cuda:0"]]]
    has_tensors = name not in ("wait", "barrier")
    return {
        "id": number,
        "name": "record_param_comms",
        "inputs": {
            "values": [*([tensors[0]] if has_tensors else []), 7, ["0", "default_pg"], values[0], name, *values[1:]],
            "types": ["GenericList[Tensor(float)]", "Int"],
        },
        "outputs": {"values": tensors if has_tensors else [], "types": ["GenericList[Tensor(float)]"]},
        "attrs": [{"name": key, "type": "string", "value": value} for key, value in attrs],
    }


def execution_trace(*nodes, size=4):
    group = {"pg_name": "0", "pg_desc": "default_pg", "ranks": [], "group_size": size, "group_count": 1}
    init = {"id": 3, "name": "## process_group:init ##", "inputs": {"values": [json.dumps([group])]}}
    return {"schema": "1.1.0-chakra.0.0.4", "nodes": [{"id": 1, "name": "aten::add"}, init, *nodes]}


REST = ([], [], 0, 1, 4)


def test_traces_pytorch_execution_trace_is_replayed(tmp_path):
    """One rank's trace stands for all ranks, as PARAM's --use-one-trace; nodes without work are left out."""
    split = [("in_split_size", "[1, 2, 3, 4]"), ("out_split_size", "[4, 3, 2, 1]"), ("dtype", "BFloat16")]
    nodes = [
        comm_node(10, "allreduce", [0, *REST]),
        comm_node(11, "wait", [0, *REST]),
        comm_node(12, "broadcast", [2, *REST]),
        comm_node(13, "_allgather_base", [0, *REST], attrs=[("in_msg_nelems", 256), ("out_msg_nelems", 1024)]),
        comm_node(14, "all_to_allv", [0, *REST], attrs=split, elements=10),
    ]
    (tmp_path / "a.json").write_text(json.dumps(execution_trace(*nodes)))
    trace = traces.load(tmp_path / "a.json")
    assert [(one.record, one.collective, one.size_bytes, one.root) for one in trace.operations] == [
        (10, "all-reduce", 4096, None),
        (12, "broadcast", 4096, 2),
        (13, "all-gather", 4096, None),
        (14, "all-to-allv", 20, None),
    ]
    assert trace.ranks == 4
    assert trace.operations[3].counts[0] == (2, 4, 6, 8)


def test_traces_pytorch_execution_trace_of_each_rank_has_its_messages(tmp_path):
    """A send names only its peer, as a rank of the group; the file's name gives the other end."""
    for rank, (name, peer) in enumerate((("send", 1), ("recv", 0))):
        trace = execution_trace(comm_node(10, name, [peer, [], [], 0, 1, 2]), size=2)
        (tmp_path / f"{rank}.json").write_text(json.dumps(trace))
    (operation,) = traces.load(tmp_path).operations
    assert (operation.collective, operation.members, operation.size_bytes) == ("p2p", (0, 1), 4096)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([], "none of the 2 nodes .* recorded without communication"),
        ([comm_node(9, "broadcast", [9, *REST])], "node 9: not a record_param_comms"),
        ([comm_node(9, "allreduce", [0])], "node 9: not a record_param_comms"),
        (
            [comm_node(9, "allreduce", [0, *REST], attrs=[("dtype", "Quantum")])],
            'record 9: unknown data type "quantum"',
        ),
    ],
)
def test_traces_pytorch_execution_trace_that_cannot_be_read_names_the_node(tmp_path, nodes, message):
    (tmp_path / "a.json").write_text(json.dumps(execution_trace(*nodes)))
    with pytest.raises(ConfigError, match=message):
        traces.load(tmp_path / "a.json")


def test_traces_file_of_unsupported_records_alone_names_each(tmp_path):
    """PARAM's `_v` collectives have no schedule here; which records they are must not depend on the other records."""
    recorded = Path(__file__).parents[3] / "data" / "captures" / "param-v.json"
    with pytest.raises(UsageError, match=r"record 1: reduce_scatter_v: .* not supported; record 2: all_gather_v: .*"):
        traces.fitted(traces.load(recorded), ranks=4)
