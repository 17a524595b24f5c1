"""A flow in perftest's JSON: the keys, their order and units, as written by perftest 6.24 on a soft lab."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from faultbed.harness.cli.main import cli
from faultbed.traffic.engine.run_results import Window
from faultbed.traffic.flows import perftest_json
from faultbed.traffic.flows.flow_run import FlowResult, FlowSpec, Latency

INFO = [
    "test",
    "Dual_port",
    "Device",
    "Number_of_qps",
    "Transport_type",
    "Connection_type",
    "Using_SRQ",
    "PCIe_relax_order",
    "ibv_wr_API",
    "TX_depth",
    "CQ_Moderation",
    "Mtu",
    "Link_type",
    "GID_index",
    "Max_inline_data",
    "rdma_cm_QPs",
    "Use_ROCm_memory",
    "Data_ex_method",
]
BANDWIDTH = ["MsgSize", "n_iterations", "BW_peak", "BW_average", "MsgRate"]
LATENCY = [
    "MsgSize",
    "n_iterations",
    "t_min",
    "t_max",
    "t_typical",
    "t_avg",
    "t_stdev",
    "percentile_99",
    "percentile_99.9",
]
TIMES = Latency(
    count=100, min_ns=2e6, mean_ns=3e6, stdev_ns=1e5, p50_ns=2.5e6, p95_ns=4e6, p99_ns=5e6, p999_ns=6e6, max_ns=7e6
)


def result(latency=None, **spec):
    made = FlowSpec(src="host1:rxe0", dst="host3:rxe0", duration_s=2.0, latency=latency is not None, **spec)
    return FlowResult(
        spec=made, outcome="completed", where=None, window=Window(start_ns=0, end_ns=2 * 10**9), sent=486, messages=486,
        size_bytes=486 * made.message_bytes, goodput_bps=127_401_984.0, latency=latency, last_value=None, totals=(),
        sent_totals=(), samples=(), connections=(), qp_errors=(), rebuilds=(), clock_error_ns={},
    )  # fmt: skip


def test_perftest_json_has_the_keys_and_units_of_ib_write_bw():
    """0.127 Gb/s of 64 KiB messages are 243 messages a second, which perftest calls 0.000243 Mpps."""
    decoded = json.loads(perftest_json.document(result(qps=4), gid_index=1))
    assert list(decoded["test_info"]) == INFO
    assert list(decoded["results"]) == BANDWIDTH
    assert decoded["test_info"]["test"] == "RDMA_Write_BW_Test"
    assert (decoded["test_info"]["Number_of_qps"], decoded["test_info"]["GID_index"]) == (4, 1)
    assert decoded["results"] == {
        "MsgSize": 65536, "n_iterations": 486, "BW_peak": 0.0, "BW_average": 0.127402, "MsgRate": 0.000243,
    }  # fmt: skip


@pytest.mark.parametrize(("verb", "part"), [("write", 2), ("send", 2), ("read", 1)])
def test_perftest_json_latencies_are_one_way_in_microseconds(verb, part):
    results = perftest_json.report(result(TIMES, verb=verb, depth=1), gid_index=1)
    assert list(results["test_info"]) == [key for key in INFO if key != "CQ_Moderation"]
    assert list(results["results"]) == LATENCY
    assert results["test_info"]["test"].endswith("_Latency_Test")
    assert results["results"]["t_typical"] == pytest.approx(2500 / part)
    assert results["results"]["percentile_99.9"] == pytest.approx(6000 / part)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--pattern", "permutation"], "one flow in a file"),
        (["--spread", "split"], "splits no message"),
        (["--perftest-json", "no/x.json"], "there is no folder no"),
    ],
)
def test_perftest_json_unsupported_option_is_rejected_before_the_run(tmp_path, options, words):
    done = CliRunner().invoke(cli, ["traffic", "flow", "--perftest-json", str(tmp_path / "x.json"), *options])
    assert done.exit_code != 0
    assert words in f"{done.output} {done.exception}"
