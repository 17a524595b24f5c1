"""Runs that differ in one thing, to be compared."""

from __future__ import annotations

from synthetic_run import MS, T0, S, changed, lost_at, synthetic_run

from faultbed.harness.record.evidence.workload_evidence import RebuildMark


def with_loads(run, *, second_spine=60_000_000):
    """Return the run with bytes on every port: 40 MB over the first spine, `second_spine` bytes over the second."""
    before, after = (
        {node: dict(one) for node, one in kept.items()}
        for kept in (run.telemetry.counters_before, run.telemetry.counters_after)
    )
    for link in run.lab.topology.links:
        first = "ctsw1" in {link.a.node, link.b.node}
        moved = 70_000_000 if not link.is_uplink else 40_000_000 if first else second_spine
        for port in (link.a, link.b):
            for name in ("tx_bytes", "rx_bytes"):
                before.setdefault(port.node, {})[f"{port.netdev}.{name}"] = 0
                after.setdefault(port.node, {})[f"{port.netdev}.{name}"] = moved
    return changed(run, counters_before=before, counters_after=after)


def dead(run, rebuilt_after_ms):
    """Return the run with a queue pair that died in the flap and was rebuilt."""
    at_ns = T0 + int(9.6 * S)
    back_ns = at_ns + rebuilt_after_ms * MS
    mark = RebuildMark(error_ns=at_ns, rebuilt_ns=back_ns, recovered_ns=back_ns + 20 * MS)
    return changed(run, qps_lost=(lost_at(at_ns),), rebuild_marks=(mark,))


def otherwise():
    """Return a shorter run whose bytes crossed the first spine, and whose queue pair was rebuilt late."""
    return dead(with_loads(synthetic_run(seconds=49.0), second_spine=10_000_000), 400)
