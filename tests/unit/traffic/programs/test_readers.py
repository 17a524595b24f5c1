"""Readers of progress: recorded outputs become steps, and what they do not know is no step."""

from __future__ import annotations

import pytest

from faultbed.traffic.node.programs.readers import Step, reader_of

S = 1_000_000_000

PERFTEST = """
************************************
* Waiting for client to connect... *
************************************
---------------------------------------------------------------------------------------
                    RDMA_Write BW Test
 Dual-port       : OFF\t\tDevice         : rxe0
 Number of qps   : 1\t\tTransport type : IB
 Mtu             : 1024[B]
---------------------------------------------------------------------------------------
 local address: LID 0000 QPN 0x0011 PSN 0x5c1f1b RKey 0x00035b VAddr 0x007f8d1e9d0000
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 65536      400              0.00               0.21   \t\t     0.000400
 65536      410              0.00               0.22   \t\t     0.000410
 65536      0                0.00               0.00   \t\t     0.000000
 65536      390              0.00               0.20   \t\t     0.000390
---------------------------------------------------------------------------------------
"""
HEAD = next(number for number, line in enumerate(PERFTEST.splitlines()) if "#bytes" in line)

NCCL = """
# nThread 1 nGpus 1 minBytes 1048576 maxBytes 4194304 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576        262144     float     sum      -1    52.31   20.05   35.08      0    51.90   20.21   35.36      0
     2097152        524288     float     sum      -1    81.02   25.88   45.30      0    80.77   25.96   45.44      2
     4194304       1048576     float     sum      -1    140.1   29.94   52.40    N/A    139.8   30.00   52.50    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 44.3467
"""

RPING = """server ping data: rdma-ping-0: ABCDEFGHIJKLMNOPQRSTUVWXYZ
ping data: rdma-ping-1: BCDEFGHIJKLMNOPQRSTUVWXYZ[
ping data: rdma-ping-2: CDEFGHIJKLMNOPQRSTUVWXYZ[\\
data mismatch!
client DISCONNECT EVENT...
"""


def fio(*totals):
    return "\n".join(
        f'fio: starting\n{{\n  "fio version" : "fio-3.39",\n  "jobs" : [\n    {{ "jobname" : "w",\n'
        f'      "read" : {{ "io_bytes" : 0 }}, "write" : {{ "io_bytes" : {total} }}\n    }}\n  ]\n}}'
        for total in totals
    )


def steps_of(progress, text):
    """Return the steps of a text whose lines arrive one second apart."""
    reader = reader_of(progress)
    steps = [step for number, line in enumerate(text.splitlines()) for step in reader.line(line, number * S)]
    return [*steps, *reader.end(len(text.splitlines()) * S)]


def test_perftest_rows_are_the_bytes_since_the_row_before():
    first, *rest = steps_of("perftest", PERFTEST)
    assert (first.size_bytes, first.is_iteration) == (0, False)
    assert [step.size_bytes for step in rest] == [65536 * 410, 0, 65536 * 390]
    assert [step.end_ns - step.start_ns for step in rest] == [S, S, S]


def test_single_perftest_row_is_spread_from_the_head_to_the_row():
    head, row = PERFTEST.splitlines()[HEAD : HEAD + 2]
    marker, single = steps_of("perftest", f"{head}\nnoise\n{row}\n")
    assert marker.size_bytes == 0
    assert single == Step(0, 2 * S, 65536 * 400)


@pytest.mark.parametrize("cut", [40, 700, 1200])
def test_truncated_perftest_output_has_no_invented_rows(cut):
    whole = steps_of("perftest", PERFTEST)
    assert sum(step.size_bytes for step in steps_of("perftest", PERFTEST[:cut])) <= sum(
        step.size_bytes for step in whole
    )


def test_perftest_row_without_a_head_is_nothing():
    assert steps_of("perftest", PERFTEST.splitlines()[HEAD + 1]) == []


def test_nccl_rows_are_iterations_with_their_wrong_elements():
    first, second, third = steps_of("nccl-tests", NCCL)
    assert (first.is_iteration, first.wrong) == (False, 0)
    assert (second.is_iteration, second.wrong) == (True, 2)
    assert (third.is_iteration, third.wrong) == (True, 0)


NAMES = "     1048576        262144     float     sum      -1  "
HALF, BAD = "  52.31   20.05   35.08      0", "  1.2e+07    0.09    0.16  1.04858e+06"
PER_ITERATION = "    51.00    53.00    52.90     1.10"


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        (NAMES + HALF + HALF, 0),
        (NAMES + HALF + BAD, 1_048_580),
        (NAMES + HALF + HALF + " 2026-11-28 08:00:00", 0),
        (NAMES + BAD + "                                ", 1_048_580),
        (NAMES + HALF + PER_ITERATION + BAD + PER_ITERATION, 1_048_580),
        (NAMES + HALF.replace(" 0", "N/A") + HALF.replace(" 0", "N/A"), 0),
        ("0: " + NAMES + HALF + BAD, 1_048_580),
        ("[1,0]<stdout>:" + NAMES + HALF + HALF, 0),
        (NAMES + HALF + PER_ITERATION, None),
        (NAMES + HALF + HALF[:-6], None),
        (NAMES + HALF + HALF.replace("52.31", "nan"), None),
        (NAMES + HALF + HALF.replace(" 0", "-1"), None),
        ("# " + NAMES + HALF + HALF, None),
    ],
)
def test_nccl_row_of_every_shape_has_its_wrong_elements_or_is_none(row, wrong):
    """A million wrong elements are printed as 1.04858e+06, which once counted as none."""
    steps = steps_of("nccl-tests", f"{NAMES}{HALF}{HALF}\n{row}")[1:]
    assert [step.wrong for step in steps] == ([] if wrong is None else [wrong])


def test_rping_lines_are_iterations_and_a_mismatch_is_wrong():
    first, *rest = steps_of("rping", RPING)
    assert not first.is_iteration
    assert [(step.is_iteration, step.wrong) for step in rest] == [(True, 0), (True, 0), (True, 1)]


def test_fio_reports_are_differences_of_totals():
    first, second = steps_of("fio", fio(1000, 4096, 4096))
    assert first.size_bytes == 0
    assert second.size_bytes == 3096


@pytest.mark.parametrize(
    "text", ["{\n}", "{\n not json\n}", '{\n"jobs": [{"write": {"io_bytes": "NaN"}}]\n}', fio(7)[:-1]]
)
def test_broken_fio_report_is_nothing(text):
    assert steps_of("fio", text) == []


def test_lines_are_iterations_with_the_bytes_of_their_group():
    text = "epoch 1: 100 B\nother\nepoch 2: 250 B\nepoch 3: 9999999999999999999999 B\n"
    first, second, third = steps_of(r"lines:epoch \d+: (?P<bytes>\d+) B", text)
    assert first.size_bytes == 0
    assert (second.is_iteration, second.size_bytes, second.start_ns, second.end_ns) == (True, 250, 0, 2 * S)
    assert third.size_bytes == 0, "a number of that many digits is no count of bytes"


@pytest.mark.parametrize("progress", ["perftest", "nccl-tests", "fio", "rping", "lines:step"])
@pytest.mark.parametrize("text", ["", "\0\0\0", "nan inf -1\n" * 50, "65536 nan 0.00 inf nan", "x" * 70_000])
def test_reader_finds_nothing_in_other_output(progress, text):
    assert steps_of(progress, text) == []


def test_invalid_expression_is_rejected():
    with pytest.raises(ValueError, match="not a regular expression"):
        reader_of("lines:(")
    with pytest.raises(ValueError, match="is empty"):
        reader_of("lines:")
    with pytest.raises(KeyError):
        reader_of("perftests")


def test_counters_have_no_reader_of_output():
    assert reader_of("counters") is None
