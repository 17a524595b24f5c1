"""Traces of arbitrary operations of four ranks."""

from __future__ import annotations

from hypothesis import strategies as st

from faultbed.traffic.traces import Operation, Trace

operations = st.lists(
    st.builds(
        lambda kind, first, count, units, begun, length, root: (kind, first, count, units, begun, length, root),
        st.sampled_from(
            ["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast", "reduce", "p2p", "barrier"]
        ),
        st.integers(0, 3),
        st.integers(2, 4),
        st.integers(1, 1000),
        st.integers(0, 10**6),
        st.integers(0, 10**4),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=12,
)


def drawn_trace(rows):
    """Return a trace of four ranks, each of which pauses before its operations."""
    collected, now = [], [0] * 4
    for number, (kind, first, count, units, begun, length, root) in enumerate(rows):
        members = tuple(sorted((first + step) % 4 for step in range(2 if kind == "p2p" else count)))
        starts = []
        for member in members:
            now[member] += begun * 1000 if collected else 0
            starts.append(now[member])
            now[member] += length * 1000
        collected.append(
            Operation(
                record=number,
                collective=kind,
                members=members,
                size_bytes=4 if kind == "barrier" else units * 4 * len(members),
                root=members[root % len(members)] if kind in ("broadcast", "reduce") else None,
                pauses_ns=(0,) * len(members),
                not_before_ns=tuple(starts),
                duration_ns=length * 1000,
                dtype="fp32",
            )
        )
    return Trace(source="made", format="recorded", ranks=4, operations=tuple(collected))


def by_rank(trace, rank):
    return [
        (operation.collective, operation.members, operation.size_bytes, operation.root)
        for operation in trace.operations
        if rank in operation.members
    ]
