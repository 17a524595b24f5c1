"""Message times are sampled over the whole run of a flow, however many messages it has."""

from faultbed.traffic.node.flows.latencies import Latencies


def test_latencies_cover_the_whole_run_when_memory_is_full():
    """A limit of 64 values must not hide a thousand slow messages after a thousand fast ones."""
    latencies = Latencies(limit=64)
    for took_ns in [1] * 1000 + [100] * 1000:
        latencies.add(took_ns)
    assert 16 <= len(latencies.values_ns) < 64
    assert len(latencies.values_ns) == 2000 // latencies.every
    assert abs(latencies.values_ns.count(100) - latencies.values_ns.count(1)) <= 2


def test_latencies_below_the_limit_are_all_kept():
    latencies = Latencies(limit=64)
    for took_ns in range(60):
        latencies.add(took_ns)
    assert latencies.values_ns == list(range(60))
    assert latencies.every == 1
