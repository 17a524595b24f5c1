"""Detection of a lost host, and how a host joins a job again."""

from __future__ import annotations

import pytest
from local_traffic import LocalLab

from faultbed.testbed.errors import LabError
from faultbed.traffic.engine.engine_client import Engines, endpoint
from faultbed.traffic.workloads.elastic import loss, rejoin
from faultbed.traffic.workloads.elastic.loss import SILENT_AFTER_ERROR_NS, SILENT_NS, SILENT_STARTING_NS

NOW_NS = 100 * SILENT_STARTING_NS


@pytest.mark.parametrize(("limit_ns", "options"), [
    (SILENT_NS, {}),
    (SILENT_AFTER_ERROR_NS, {"failing": {"host1"}}),
    (SILENT_NS, {"failing": {"host2"}}),
    (SILENT_STARTING_NS, {"is_starting": True}),
    (SILENT_AFTER_ERROR_NS, {"is_starting": True, "failing": {"host1"}}),
])  # fmt: skip
def test_host_is_silent_only_beyond_the_limit_of_its_situation(limit_ns, options):
    heard_ns = {"host1": NOW_NS - limit_ns, "host3": 0}
    hosts = ["host1", "host4"]
    assert loss.silent_hosts(heard_ns, hosts, NOW_NS, **options) == {}
    assert loss.silent_hosts(heard_ns, hosts, NOW_NS + 1, **options) == {"host1": limit_ns + 1}


@pytest.mark.parametrize(("connections", "host"), [
    ([], ()),
    ([("host1", "host2")], ()),
    ([("host1", "host2"), ("host2", "host3")], ("host2",)),
    ([("host1", "host2"), ("host2", "host1"), ("host3", "host1")], ("host1",)),
    ([("host1", "host2"), ("host3", "host4")], ()),
])  # fmt: skip
def test_host_that_most_failed_connections_share_is_cut_off(connections, host):
    assert loss.most_cut_off(connections) == host


@pytest.fixture
def lab(tmp_path):
    made = LocalLab(tmp_path)
    yield made
    made.close()


def test_engine_starts_only_once_its_rnics_have_their_addresses(lab):
    """A booted host answers before it is provisioned."""
    engines, rnics, pauses = Engines(), [endpoint(lab.topology, "host1:rxe0")], []
    lab.bare.add("host1")

    def pause(seconds):
        pauses.append(seconds)
        assert lab.processes == {}
        if len(pauses) == 2:
            lab.bare.clear()
        return True

    rejoin.start_engine(lab, engines, "host1", rnics, patience_s=60, pause=pause)
    assert (pauses, engines.hosts) == ([rejoin.RETRY_S] * 2, ("host1",))
    engines.close()


@pytest.mark.parametrize(("patience_s", "goes_on"), [(0, True), (60, False)])
def test_engine_that_cannot_start_is_an_error_after_the_patience_or_at_the_end_of_the_run(lab, patience_s, goes_on):
    engines, rnics = Engines(), [endpoint(lab.topology, "host1:rxe0")]
    lab.bare.add("host1")
    with pytest.raises(LabError, match="host1: the traffic engine did not start: host1:rxe0 has no RoCE v2 GID for"):
        rejoin.start_engine(lab, engines, "host1", rnics, patience_s=patience_s, pause=lambda _: goes_on)
    assert (lab.processes, engines.hosts) == ({}, ())
