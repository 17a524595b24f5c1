"""Exit codes of `traffic flow`, and the row of `traffic collective`."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from faultbed.harness.cli.traffic.flows_and_collectives import _collective_row, _exit_code_of_flows
from faultbed.harness.verdict import ExitCode
from faultbed.traffic.flows.flow_run import FlowSpec
from faultbed.traffic.workloads.collective import CollectiveSpec

SPECS = [FlowSpec(src="host1:rxe0", dst=f"host{number}:rxe0") for number in (2, 3, 4)]


@pytest.mark.parametrize(
    ("sizes", "outcome", "code", "words"),
    [
        ((4, 4, 4), "completed", ExitCode.PASS, ""),
        ((4, 4, 4), "recovered", ExitCode.PASS, "recovered"),
        ((4, 0, 4), "completed", ExitCode.FAIL, "no data: no message arrived on host1:rxe0 -> host3:rxe0; look"),
        ((0, 0, 0), "recovered", ExitCode.FAIL, "host1:rxe0 -> host2:rxe0 and 2 more; look"),
        ((0, 0, 0), "failed", ExitCode.ERROR, "failed: the end"),
    ],
)
def test_flow_of_which_nothing_arrived_is_a_failure(sizes, outcome, code, words):
    """On links of 3 Mb/s, messages of 64 KiB outlast the QPs' timeouts and nothing arrives. The exit code was once
    0."""
    flows = tuple(
        SimpleNamespace(spec=spec, size_bytes=size, wrong_bytes=None) for spec, size in zip(SPECS, sizes, strict=True)
    )
    session = SimpleNamespace(err=Console(file=io.StringIO(), width=200))
    result = SimpleNamespace(flows=flows, outcome=outcome, where="the end")
    assert _exit_code_of_flows(session, result) is code
    assert words in session.err.file.getvalue()


@pytest.mark.parametrize(
    ("checked", "code"), [(4, ExitCode.PASS), (0, ExitCode.INCONCLUSIVE), (None, ExitCode.INCONCLUSIVE)]
)
def test_flow_of_which_no_byte_was_checked_is_no_pass(checked, code):
    """`--check` finds no wrong byte if no byte arrives."""
    flow = SimpleNamespace(spec=replace(SPECS[0], check=True), size_bytes=4, checked_bytes=checked, wrong_bytes=0)
    session = SimpleNamespace(err=Console(file=io.StringIO(), width=200))
    result = SimpleNamespace(flows=(flow,), outcome="completed", where=None)
    assert _exit_code_of_flows(session, result) is code
    assert ("no byte of host1:rxe0 -> host2:rxe0 was checked" in session.err.file.getvalue()) is bool(code)


def test_collective_that_finished_no_operation_has_no_times_and_no_bandwidth():
    spec = CollectiveSpec(collective="all-reduce", size_bytes=4096)
    result = SimpleNamespace(
        spec=spec, ranks=("host1:rxe0", "host2:rxe0"), algorithm="ring", time_ns=0.0, algbw_gbytes_per_s=0.0,
        busbw_gbytes_per_s=0.0, wrong_elements=0, iterations_completed=0,
    )  # fmt: skip
    assert _collective_row(result)[-4:] == ("n/a", "n/a", "n/a", "0")
    result.iterations_completed, result.time_ns = 1, 2e6
    assert _collective_row(result)[-4:] == ("2000", "0.00000", "0.00000", "0")
