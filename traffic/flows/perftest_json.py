"""A flow's result in the format of perftest's `--out_json`, for tools that read that. Pure.

Keys and their order are those of perftest 6.24 (Debian's 24.10), as written by `ib_write_bw --report_gbits` and
`ib_write_lat`: Gb/s, millions of messages per second, microseconds. A flow runs for a duration, so there is no peak (0,
as in perftest). perftest's latency is half a round trip for a write or a send, and a full one for a read or an atomic.
faultbed measures from posting to completion, which for a write ends with its ACK.
"""

from __future__ import annotations

import json
from typing import Any

from faultbed.traffic.flows.flow_run import FlowResult, engine_spec

__all__ = ["document", "report"]

_TESTS = {"write": "RDMA_Write", "write-imm": "RDMA_Write", "send": "Send", "read": "RDMA_Read", "atomic": "Atomic"}
_ONE_WAY = ("write", "write-imm", "send")


def document(result: FlowResult, *, gid_index: int) -> str:
    """Return the text of the file: a JSON object with `test_info` and `results`."""
    return json.dumps(report(result, gid_index=gid_index), indent=0) + "\n"


def report(result: FlowResult, *, gid_index: int) -> dict[str, Any]:
    """Return the content of the file as plain data. `gid_index` is that of the sender's RoCE v2 GID."""
    spec = result.spec
    test = "BW" if result.latency is None else "Latency"
    engine = engine_spec(spec)
    return {
        "test_info": {
            "test": f"{_TESTS[spec.verb]}_{test}_Test",
            "Dual_port": "OFF",
            "Device": spec.src.partition(":")[2],
            "Number_of_qps": spec.qps,
            "Transport_type": "IB",
            "Connection_type": spec.transport.upper(),
            "Using_SRQ": "OFF",
            "PCIe_relax_order": "OFF",
            "ibv_wr_API": "OFF",
            "TX_depth": engine["depth"],
            **({"CQ_Moderation": engine["batch"]} if test == "BW" else {}),
            "Mtu": spec.qp.mtu,
            "Link_type": "Ethernet",
            "GID_index": gid_index,
            "Max_inline_data": 0,
            "rdma_cm_QPs": "OFF",
            "Use_ROCm_memory": "OFF",
            "Data_ex_method": "Ethernet",
        },
        "results": {
            "MsgSize": spec.message_bytes,
            "n_iterations": result.messages,
            **(_bandwidth(result) if test == "BW" else _latency(result)),
        },
    }


def _bandwidth(result: FlowResult) -> dict[str, float]:
    bits = result.spec.message_bytes * 8
    return {
        "BW_peak": 0.0,
        "BW_average": round(result.goodput_bps / 1e9, 6),
        "MsgRate": round(result.goodput_bps / bits / 1e6, 6),
    }


def _latency(result: FlowResult) -> dict[str, float]:
    latency = result.latency
    if latency is None:
        return {}
    part = 2e3 if result.spec.verb in _ONE_WAY else 1e3
    times_ns = {
        "t_min": latency.min_ns,
        "t_max": latency.max_ns,
        "t_typical": latency.p50_ns,
        "t_avg": latency.mean_ns,
        "t_stdev": latency.stdev_ns,
        "percentile_99": latency.p99_ns,
        "percentile_99.9": latency.p999_ns,
    }
    return {name: round(value / part, 2) for name, value in times_ns.items()}
