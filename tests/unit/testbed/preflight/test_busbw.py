"""The output of nccl-tests compared with a lab's table: only rows below the expected busbw are findings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory.schema import BusbwVars
from faultbed.testbed.preflight.busbw import compare, read

HEAD = """\
# nThread 1 nGpus 1 minBytes 1073741824 maxBytes 8589934592 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1
#
# Using devices
#  Rank  0 Group  0 Pid  41012 on      host1 device  0 [0x19] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid  41013 on      host1 device  1 [0x2b] NVIDIA H100 80GB HBM3
#
# Collective test starting: all_reduce_perf
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
ROW = (
    "{size:>12} {count:>13}     float     sum      -1"
    "  {time:>7}  {alg:>6}  {out:>6}  {w1:>5}  {time:>7}  {alg:>6}  {inn:>6}  {w2:>5}\n"
)
TAIL = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 47.1\n"
MIB, GIB = 2**20, 2**30
TAGGED = """\
[1,0]<stdout>:# nThread 1 nGpus 1 minBytes 1073741824 maxBytes 1073741824 step: 2(factor) warmup iters: 5 iters: 20
[1,0]<stdout>:#  Rank  0 Group  0 Pid  41012 on      host1 device  0 [0x19] NVIDIA H100 80GB HBM3
[1,1]<stderr>:host2:41013:41013 [1] NCCL INFO Bootstrap : Using eth0:192.0.2.12<0>
[1,0]<stdout>:#  Rank  1 Group  0 Pid  41013 on      host2 device  0 [0x2b] NVIDIA H100 80GB HBM3
[1,0]<stdout>: 1073741824 268435456 float sum -1    39561   27.14   47.50      0    39600   27.11   47.45      0
[1,0]<stdout>:# Out of bounds values : 0 OK
"""
"""As `mpirun --tag-output` writes it, in logs of the MPI operator and of AWS' examples."""
TABLE = [
    BusbwVars(ranks=2, size_bytes=16 * MIB, at_least_gbytes_per_s=20),
    BusbwVars(ranks=2, size_bytes=GIB, at_least_gbytes_per_s=40),
    BusbwVars(ranks=32, size_bytes=GIB, at_least_gbytes_per_s=44),
]


def output(*rows):
    lines = [
        ROW.format(
            size=size, count=size // 4, time="4711.2", alg="25.20", out=f"{out:.2f}", inn=f"{inn:.2f}", w1=w, w2=w
        )
        for size, out, inn, w in rows
    ]
    return HEAD + "".join(lines) + TAIL


def test_busbw_run_is_decoded():
    run = read(output((GIB, 47.25, 46.5, 0), (8, 0.01, 0.02, "N/A")))
    assert (run.collective, run.ranks) == ("all-reduce", 2)
    assert [(x.size_bytes, x.gbytes_per_s, x.wrong) for x in run.lines] == [(GIB, 46.5, 0), (8, 0.01, None)]


def test_busbw_run_that_did_not_come_to_its_end_is_rejected():
    """A hang at the first large size left the small ones, and nothing was short."""
    ended = output((16 * MIB, 30, 30, 0))
    assert compare(read(ended), TABLE) == []
    with pytest.raises(UsageError, match="did not come to its end"):
        read(ended.removesuffix(TAIL) + "host1: Test timeout\n")


def test_busbw_more_than_one_run_is_rejected():
    """Without MPI, 32 programs of one rank used to count as a run of 32 ranks, and a second run as the first one."""
    alone = output((GIB, 0, 0, 0)).replace("Rank  1", "Rank  0")
    with pytest.raises(UsageError, match="without MPI"):
        read(alone)
    with pytest.raises(UsageError, match="more than one run"):
        read(output((GIB, 47, 46, 0)) + output((GIB, 47, 46, 0)).replace("all_reduce", "all_gather"))


def test_busbw_collective_is_read_from_the_programs_output_not_the_command_line():
    text = output((GIB, 47.25, 46.5, 0))
    assert read("$ mpirun ./all_gather_perf -b 8\n" + text).collective == "all-reduce"
    unsaid = text.replace("# Collective test starting: all_reduce_perf\n", "")
    assert read(unsaid).collective is None
    for redop, root in (("none", "-1"), ("sum", "0")):
        with pytest.raises(UsageError, match="no all-reduce"):
            read(unsaid.replace("sum      -1", f"{redop}      {root}"))


def test_busbw_shortfall_is_reported_with_its_size():
    short = compare(read(output((GIB, 47, 39.9, 0), (2 * GIB, 47, 47, 0), (64 * MIB, 19, 30, 0))), TABLE)
    assert [(one.where, one.observed) for one in short] == [
        (f"all-reduce of 2, {GIB} bytes", "busbw 39.9 GB/s"),
        (f"all-reduce of 2, {64 * MIB} bytes", "busbw 19 GB/s"),
    ]
    assert "at least 20 GB/s" in short[1].expected


def test_busbw_with_wrong_data_is_never_fast_enough():
    (short,) = compare(read(output((GIB, 99, 99, 3))), TABLE)
    assert short.observed == "6 wrong elements"


@given(st.integers(1, 1 << 33))
def test_busbw_any_number_of_wrong_elements_is_found(wrong):
    """From a million on it is printed as 1e+06, and the line used to be skipped: the worst data were no finding."""
    short = compare(read(output((GIB, 99, 99, 0), (2 * GIB, 99, 99, f"{wrong:g}"))), TABLE)
    assert [one.where for one in short] == [f"all-reduce of 2, {2 * GIB} bytes"]
    assert "wrong elements" in short[0].observed


@pytest.mark.parametrize("row", ["nan", "-1", "3.1e-05", "inf", ""])
def test_busbw_line_of_results_that_cannot_be_read_is_named(row):
    text = output((GIB, 99, 99, 0), (2 * GIB, 99, 99, row))
    with pytest.raises(UsageError, match=f"cannot be read: .{2 * GIB} "):
        read(text)


def test_busbw_output_that_failed_without_a_wrong_line_is_rejected():
    failed = output((GIB, 99, 99, 0)).replace("values : 0 OK", "values : 1 FAILED")
    with pytest.raises(UsageError, match="ends with FAILED"):
        read(failed)
    assert compare(read(failed.replace(" 0 ", " 7 ")), TABLE)


@given(st.floats(0.01, 400), st.floats(0.01, 400), st.integers(1, 64))
def test_busbw_check_has_no_false_alarm_and_no_miss(out, inn, mib):
    size = mib * 16 * MIB
    rounded = min(round(out, 2), round(inn, 2))
    short = compare(read(output((size, out, inn, 0))), TABLE)
    assert bool(short) == (rounded < (40 if size >= GIB else 20))


def test_busbw_output_that_cannot_be_judged_is_rejected():
    with pytest.raises(UsageError, match="no line of results"):
        read("command not found")
    with pytest.raises(UsageError, match=r"no line for all-reduce of 2 ranks; it has all-reduce of 32"):
        compare(read(output((GIB, 47, 47, 0))), TABLE[2:])
    with pytest.raises(UsageError, match="below the table's first"):
        compare(read(output((8, 1, 1, 0))), TABLE)


def test_preflight_busbw_command_exit_code_and_json(faultbed, tmp_path):
    file = tmp_path / "out.txt"
    ranks = "".join(f"#  Rank {n:2d} Group  0 Pid  1 on host1 device  0 [0x19] NVIDIA H100\n" for n in range(2, 32))
    for rate, code in ((47, 0), (30, 1)):
        file.write_text(ranks + output((GIB, rate, rate, 0)))
        done = faultbed("--lab", "inventory/rack-h100.example.yml", "preflight", "--busbw", str(file), "--json")
        assert done.returncode == code, done.stderr
        assert len(json.loads(done.stdout)["short"]) == code


def test_busbw_output_tagged_by_mpirun_is_decoded():
    run = read(TAGGED)
    assert run.ranks == 2
    assert [(line.size_bytes, line.gbytes_per_s) for line in run.lines] == [(GIB, 47.45)]


RECORDED = Path(__file__).parents[3] / "data" / "captures"


@pytest.mark.parametrize(("name", "slow"), [("slow-10s", [1.35]), ("timestamps", [])])
def test_busbw_of_iterations_of_ten_seconds_and_with_timestamps_is_decoded(name, slow):
    """10 s is printed as 1.2e+07 us, and -S appends the time of day."""
    table = [BusbwVars(ranks=32, size_bytes=GIB, at_least_gbytes_per_s=300)]
    run = read((RECORDED / f"nccl-{name}.txt").read_text())
    assert [float(one.observed.split()[1]) for one in compare(run, table)] == slow


@pytest.mark.parametrize("tag", ["[1,0]<stdout>:", "[prterun-host1-4711@1,0]<stdout>: ", "0: ", "  0: ", "[0] "])
def test_busbw_labels_of_launchers_are_removed(tag):
    """As mpirun --tag-output, PRRTE, srun --label and MPICH write them."""
    text = output((GIB, 47, 46, 0))
    assert read("".join(tag + line for line in text.splitlines(keepends=True))) == read(text)


def test_busbw_of_per_iteration_reports_is_decoded():
    """`-I` adds four columns to each half of a row."""
    head = HEAD.replace("#wrong     time", "#wrong  i_min i_max i_p99 i_cv%     time")
    half = "4711.2 25.20 {busbw} {wrong} 4700.00 4800.00 4790.00 1.20"
    row = f"{GIB} {GIB // 4} float sum -1 {half.format(busbw=47.5, wrong=0)} {half.format(busbw=46.5, wrong=2)}"
    (line,) = read(f"{head}{row} 2026-07-09 16:03:21\n{TAIL}").lines
    assert (line.gbytes_per_s, line.wrong) == (46.5, 2)
    with pytest.raises(UsageError, match="cannot be read"):
        read(f"{HEAD}{row}\n{TAIL}")


def test_busbw_of_one_half_alone_is_decoded():
    """rccl-tests and trace replays print in-place results alone."""
    row = f"{GIB} {GIB // 4} float sum -1 {' ' * 32} 4711.2 25.20 46.50 0\n"
    assert [line.gbytes_per_s for line in read(HEAD + row + TAIL).lines] == [46.5]


def test_busbw_of_split_groups_counts_the_ranks_of_one_group():
    """With NCCL_TESTS_SPLIT, 8 ranks in groups of 2 are 4 runs of 2, not one of 8."""
    rank = "#  Rank {rank:2d} Group {group:2d} Pid  1 on host1 device  0 [0x19] NVIDIA H100\n"
    text = output((GIB, 47, 46, 0)).split("# Using devices\n")[1].split("#\n", 1)[1]
    groups = "".join(rank.format(rank=rank_, group=rank_ % 4) for rank_ in range(8))
    assert read(groups + text).ranks == 2
    with pytest.raises(UsageError, match=r"differ in size.*3 ranks in group 0"):
        read(groups + rank.format(rank=8, group=0) + text)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (output((GIB, 47, 46, 0)).replace("   time ", "cputime "), "CPU time"),
        ("size,count,type,redop,root,time,algbw,busbw\n1,2,float,sum,-1,3,4,5\n", "CSV"),
        (output((GIB, 47, 46, 0)).replace("NVIDIA H100 80GB HBM3\n#\n", "...\n#\n"), "cut short"),
    ],
)
def test_busbw_output_of_another_kind_is_refused_by_name(text, named):
    with pytest.raises(UsageError, match=named):
        read(text)


def json_output(**changes):
    """Return what `-J` writes, as src/util.cu of nccl-tests does."""
    half = {"time": 4711.2, "alg_bw": 25.2, "bus_bw": 46.5, "nwrong": 0.0}
    row = {"size": GIB, "count": GIB // 4, "type": "float", "redop": "sum", "root": "    -1", "out_of_place": half}
    document = {
        "version": 2,
        "args": ["/opt/all_reduce_perf", "-J", "a.json"],
        "config": {"nthreads": 1, "devices": [{"rank": rank, "group": rank % 2} for rank in range(4)]},
        "results": [{**row, "in_place": {**half, "bus_bw": 45.0, **changes.pop("half", {})}}],
        "out_of_bounds": {"count": 0, "okay": "true"},
        "average_bus_bandwidth": {"bandwidth": 45.7, "okay": "unchecked"},
    }
    return json.dumps({**document, **changes})


def test_busbw_json_is_decoded():
    run = read(json_output())
    assert (run.collective, run.ranks) == ("all-reduce", 2)
    assert [(line.size_bytes, line.gbytes_per_s, line.wrong) for line in run.lines] == [(GIB, 45.0, 0)]
    unchecked = read(json_output().replace('"nwrong": 0.0', '"nwrong": null'))
    assert [line.wrong for line in unchecked.lines] == [None], "-c 0 was reported as no wrong element"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (json_output(out_of_bounds=None), "did not come to its end"),
        (json_output(half={"bus_bw": "nan"}), "not the whole"),
        (json_output(half={"cpu_time": 1.0}), "CPU time"),
        (json_output(out_of_bounds={"count": 3}), "ends with FAILED"),
        (json_output(results=[]), "no line of results"),
        (json_output()[:-40], "not the whole"),
        (json_output().replace("45.0", "inf"), "not the whole"),
    ],
)
def test_busbw_json_that_cannot_be_judged_is_refused_by_name(text, named):
    with pytest.raises(UsageError, match=named):
        read(text)
