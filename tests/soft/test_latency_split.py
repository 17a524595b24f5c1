"""Parts of a collective's time on a real lab: a fault lengthens the part on which it acts."""

from __future__ import annotations

import pytest

from faultbed.traffic.engine.engine_client import Engines
from faultbed.traffic.engine.task_specs import QpParams
from faultbed.traffic.workloads import collective
from faultbed.traffic.workloads.collective import CollectiveSpec

pytestmark = [pytest.mark.soft, pytest.mark.slow, pytest.mark.needs("hosts >= 4")]

BUSY = ("post", "copy", "completion")
DELAY_MS = 50


@pytest.fixture
def measure(lab):
    """Run 20 operations of 64 KiB, and return their mean busy time and mean wait for the wire in ns."""
    ranks = tuple(f"{host.name}:rxe0" for host in lab.topology.hosts[:4])
    with Engines.start(lab, [host.name for host in lab.topology.hosts[:4]]) as engines:

        def run():
            spec = CollectiveSpec(
                collective="all-to-all", size_bytes=1 << 16, iterations=20, warmup=2, ranks=ranks,
                qp=QpParams(timeout=18),
            )  # fmt: skip
            with collective.start(lab, spec, engines=engines) as running:
                result = running.wait(120.0)
            assert (result.outcome, result.wrong_elements) == ("completed", 0), result.where
            parts_ns = result.latency_split.parts_ns
            assert sum(parts_ns.values()) > 0.9 * result.time_ns
            return sum(parts_ns[name] for name in BUSY), parts_ns["wire"]

        yield run


def test_cpu_contention_lengthens_the_busy_parts_of_an_operation(lab, inject, measure):
    """The host without CPU time enters each operation last. It hardly waits, because the others have already sent."""
    clean_busy_ns, clean_wire_ns = measure()
    fault = inject("host.cpu-steal", lab.topology.hosts[0].name, share=0.8)
    fault.arm()
    busy_ns, wire_ns = measure()
    assert fault.clear().proved
    assert busy_ns > 1.5 * clean_busy_ns
    assert busy_ns - clean_busy_ns > wire_ns - clean_wire_ns


def test_delay_of_packets_lengthens_the_wait_for_the_wire(lab, inject, measure):
    """The rank still works during a part of the delay, and waits for the rest of it."""
    clean_busy_ns, clean_wire_ns = measure()
    fault = inject("packet.delay", f"{lab.topology.hosts[0].name}:rxe0", delay=f"{DELAY_MS}ms")
    fault.arm()
    busy_ns, wire_ns = measure()
    assert fault.clear().proved
    assert wire_ns - clean_wire_ns > 0.5 * DELAY_MS * 1e6
    assert wire_ns - clean_wire_ns > 3 * (busy_ns - clean_busy_ns)
