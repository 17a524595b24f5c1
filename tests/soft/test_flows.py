"""Flows over real queue pairs: every verb, every way to spread messages over QPs, paced, and many at once."""

import pytest

from traffic import flow, matrix
from traffic.engine import Engines
from traffic.flow import FlowSpec
from traffic.plan import QpParams

pytestmark = [pytest.mark.soft, pytest.mark.needs("hosts >= 4")]

PATIENT = QpParams(timeout=18)
"""An ACK timeout of 1.07 s: on a busy machine a virtual CPU that pauses is not a lost packet."""


def test_flows_of_every_kind_carry_what_they_were_asked_to(lab, subtests):
    """Counts of messages by QP, what atomics found, and rates and bursts as they were asked for."""
    hosts = [host.name for host in lab.topology.hosts[:4]]
    src, dst = f"{hosts[0]}:rxe0", f"{hosts[-1]}:rxe0"

    def run(*specs):
        asked = [FlowSpec(**{"src": src, "dst": dst, "qp": PATIENT, **spec}) for spec in specs]
        result = flow.start_all(lab, asked, engines=engines).wait(120.0)
        assert result.outcome == "completed", result.where
        return result.flows

    with Engines.start(lab, hosts) as engines:
        for verb in ("write", "send", "read"):
            with subtests.test(verb=verb):
                (one,) = run({"verb": verb, "message_bytes": 16384, "qps": 2, "depth": 4, "messages": 240})
                assert one.messages == 240
                assert one.size_bytes == 240 * 16384
                assert [total.messages for total in one.totals] == [120, 120]
        with subtests.test(verb="atomic"):
            (one,) = run({"verb": "atomic", "message_bytes": 8, "messages": 200})
            assert (one.messages, one.last_value) == (200, 199)
        with subtests.test(spread="split"):
            (one,) = run({"message_bytes": 32768, "qps": 4, "spread": "split", "messages": 50})
            assert (one.messages, one.size_bytes) == (50, 50 * 32768)
            assert [total.size_bytes for total in one.totals] == [50 * 8192] * 4
        with subtests.test(spread="round-robin"):
            (one,) = run({"message_bytes": 4096, "qps": 3, "spread": "round-robin", "duration_s": 2.0, "chain": 1})
            counts = [total.messages for total in one.totals]
            assert max(counts) - min(counts) <= 1
        with subtests.test(pace="rate and bursts"):
            rate_bps, size = 2e6, 4096
            steady, bursts = run(
                {"message_bytes": size, "rate_bps": rate_bps, "duration_s": 4.0},
                {"message_bytes": size, "on_s": 0.5, "off_s": 1.0, "duration_s": 4.0, "dst": f"{hosts[1]}:rxe0"},
            )
            wanted = rate_bps * 4.0 / 8 / size
            assert 0.5 * wanted <= steady.messages <= 1.05 * wanted + 2
            sizes = [sample.size_bytes for sample in bursts.samples if sample.endpoint == src]
            assert sum(size == 0 for size in sizes) >= 0.35 * len(sizes), sizes
            assert sum(size > 0 for size in sizes) >= 6, sizes
        with subtests.test(pattern="incast, with a probe"):
            pairs = matrix.pairs("incast", [f"{host}:rxe0" for host in hosts])
            bulk = [{"src": one, "dst": other, "duration_s": 3.0, "depth": 4} for one, other in pairs]
            probe = {"message_bytes": 64, "depth": 1, "latency": True, "rate_bps": 51200, "duration_s": 3.0}
            *flows, beside = run(*bulk, {**probe, "src": pairs[0][0], "dst": pairs[0][1]})
            assert all(one.messages > 0 for one in flows)
            assert beside.latency.count == beside.messages > 0
            assert 0 < beside.latency.p50_ns <= beside.latency.p99_ns <= beside.latency.max_ns
