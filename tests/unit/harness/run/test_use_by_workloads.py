"""What the workloads of this process use at a moment."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from synthetic_run import soft_topology

from faultbed.harness.live import use_by_workloads
from faultbed.testbed.errors import LabError

SOFT = soft_topology()
PATH, ACK_PATH = ("host1", "rtsw1", "ctsw1", "rtsw2", "host3"), ("host3", "rtsw2", "ctsw2", "rtsw1", "host1")


def lab_with(*, per_packet=False):
    scheme = SimpleNamespace(scheme=SimpleNamespace(is_per_packet=True)) if per_packet else None
    return SimpleNamespace(topology=SOFT, scheme=scheme)


def workload(*ends, over=False, done=(), spec=None):
    """Return a workload with a task at each RNIC, and a connection from each to the next."""
    tasks = tuple(
        SimpleNamespace(
            name=name, endpoint=SimpleNamespace(name=name, host=name[:5]), spec=spec or {}, stops_after=None
        )
        for name in ends
    )
    pairs = list(itertools.pairwise(ends))
    planned = tuple(SimpleNamespace(index=index, src=src) for index, (src, _) in enumerate(pairs))
    actual = tuple(SimpleNamespace(index=index, src=src, dst=dst) for index, (src, dst) in enumerate(pairs))
    plan = SimpleNamespace(tasks=tasks, connections=planned)
    return SimpleNamespace(plan=plan, connections=actual, is_over=over, done=dict.fromkeys(done))


@pytest.fixture
def paths(monkeypatch):
    """Paths of data and ACKs by index; an error instead is raised."""
    known = {0: (PATH, ACK_PATH)}

    def read(_, connections):
        if "error" in known:
            raise known["error"]
        return {one.index: known[one.index] for one in connections if one.index in known}

    monkeypatch.setattr(use_by_workloads, "data_and_ack_paths", read)
    return known


FLOW = workload("host1:rxe0", "host3:rxe0")


def test_use_has_the_packets_of_each_direction_between_two_rnics(paths):
    use = use_by_workloads.use_of(lab_with(), [FLOW])
    by_pair = {pair: [use.paths[index] for index in indexes] for pair, indexes in use.by_pair.items()}
    assert by_pair == {"host1:rxe0>host3:rxe0": [PATH], "host3:rxe0>host1:rxe0": [ACK_PATH]}


def test_use_without_a_workload_is_none_and_of_an_ended_one_is_empty(paths):
    assert use_by_workloads.use_of(lab_with(), []) is None
    ended = use_by_workloads.use_of(lab_with(), [workload("host1:rxe0", "host3:rxe0", over=True)])
    assert (ended.rnics, ended.gpus, ended.paths, ended.unknown_paths) == ((), (), (), None)


def test_use_has_both_paths_and_both_ends(paths):
    use = use_by_workloads.use_of(lab_with(), [FLOW])
    assert use.paths == tuple(sorted((PATH, ACK_PATH)))
    assert use.rnics == ("host1:rxe0", "host3:rxe0")
    assert use.gpus == ("host1:gpu0", "host3:gpu0")
    assert use.unknown_paths is None


def test_use_says_which_path_was_not_read(paths):
    paths[0] = (PATH, ())
    use = use_by_workloads.use_of(lab_with(), [FLOW])
    assert (use.paths, use.unknown_paths) == ((PATH,), "the path from host1:rxe0 to host3:rxe0 was not read")
    paths["error"] = LabError("fabric: no answer")
    assert use_by_workloads.use_of(lab_with(), [FLOW]).unknown_paths == (
        "a switch did not say by which port it forwards: fabric: no answer"
    )


def test_use_of_sprayed_queue_pairs_has_no_paths_and_says_why_not(paths):
    paths[0] = ((), ())
    use = use_by_workloads.use_of(lab_with(per_packet=True), [FLOW])
    assert (use.paths, use.sprayed, use.unknown_paths) == ((), (("host1:rxe0", "host3:rxe0"),), None)


def test_use_leaves_out_ranks_that_have_finished(paths):
    """A fault on a rank that finished early counted while another group went on."""
    paths[1] = (("host3", "rtsw2", "host4"),) * 2
    job = workload("host1:rxe0", "host3:rxe0", "host4:rxe0", done=("host1:rxe0",))
    use = use_by_workloads.use_of(lab_with(), [job])
    assert use.rnics == ("host3:rxe0", "host4:rxe0")
    assert use.paths == (("host3", "rtsw2", "host4"),)


def test_use_has_the_storage_and_the_gpu_of_a_task(paths):
    storage = next(host for host in SOFT.hosts if host.name == "host4").front_end_ip
    spec = {"storage": {"address": storage}, "gpu": {"socket": "/run/faultbed/gpu7.sock"}}
    use = use_by_workloads.use_of(lab_with(), [workload("host1:rxe0", spec=spec)])
    assert use.hosts == ("host4",)
    assert use.gpus == ("host1:gpu7",)


def test_use_of_two_workloads_keeps_their_connections_apart(paths):
    use = use_by_workloads.use_of(lab_with(), [FLOW, workload("host2:rxe0", "host4:rxe0")])
    assert use.rnics == ("host1:rxe0", "host2:rxe0", "host3:rxe0", "host4:rxe0")
