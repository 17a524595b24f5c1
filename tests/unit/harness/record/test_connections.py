"""A queue pair's error is reported on the path of its own connection, also after it was rebuilt."""

from __future__ import annotations

import pytest
from synthetic_run import changed, synthetic_run

from faultbed.harness.record.evidence.workload_evidence import Connection, connection_between

ENDS = ("host1:rxe0", "host3:rxe0")


def connection(index, lqpn, rqpn, spine):
    path = ("host1", "rtsw1", spine, "rtsw2", "host3")
    return Connection(index=index, src=ENDS[0], dst=ENDS[1], lqpn=lqpn, rqpn=rqpn, udp_sport=None, path=path)


def run_with(*connections):
    return changed(synthetic_run(), connections=connections)


def test_rebuilt_queue_pair_is_found_by_its_index():
    """QP 19 went over ctsw2, died, and has number 25 at the end of the run."""
    run = run_with(connection(0, 17, 40, "ctsw1"), connection(1, 25, 41, "ctsw2"))
    assert connection_between(run.workload, ENDS, index=1, qpn=19) == run.workload.connections[1]
    assert connection_between(run.workload, ENDS[::-1], index=1, qpn=19) == run.workload.connections[1]


def test_index_of_another_pair_of_rnics_is_not_taken():
    """A restart places ranks again and renumbers connections, so an index may belong to another pair of RNICs."""
    run = run_with(connection(0, 17, 40, "ctsw1"))
    assert connection_between(run.workload, ("host1:rxe0", "host2:rxe0"), index=0, qpn=17) is None


@pytest.mark.parametrize(("qpn", "position"), [(17, 0), (18, 1), (19, None)])
def test_without_indices_the_number_at_the_first_end_decides(qpn, position):
    """QP 18 is the far end of the first connection, and the near end of the second one."""
    run = run_with(connection(None, 17, 18, "ctsw1"), connection(None, 18, 20, "ctsw2"))
    expected = None if position is None else run.workload.connections[position]
    assert connection_between(run.workload, ENDS, index=-1, qpn=qpn) == expected


def test_without_indices_the_only_connection_is_meant_whatever_its_number_is_now():
    run = run_with(connection(None, 17, 18, "ctsw1"))
    assert connection_between(run.workload, ENDS, index=3, qpn=99) == run.workload.connections[0]
