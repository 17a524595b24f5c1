"""What workloads of other programs use: queue pairs are listed, uplinks are watched."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
from house import HOUSE
from planned_faults import SOFT, soft

from faultbed.inject.evidence import use_by_others as module
from faultbed.inject.evidence.use_by_others import use_by_others
from faultbed.testbed.errors import CommandFailed

READY = {"ifname": "rxe0", "type": "RC", "state": "RTS", "lqpn": 17, "pid": 7}
IDLE = json.loads((HOUSE / "tests/data/recorded/rdma/qps-none-connected.json").read_text())
OF_EVERY_PORT = [entry | {"ifname": "rxe0"} for entry in IDLE]
"""As recorded on an idle host with a ConnectX: a datagram queue pair of the driver is ready, too."""


def lab_with(listed, topology=SOFT):
    """Return a lab whose hosts print these lists; those not named have only the queue pairs that every port has."""

    def run_on(host):
        def run(argv, timeout_s):
            assert argv[0] == "rdma"
            assert timeout_s
            if isinstance(printed := listed.get(host, OF_EVERY_PORT), Exception):
                raise printed
            return SimpleNamespace(stdout=printed if isinstance(printed, str) else json.dumps(printed))

        return run

    return SimpleNamespace(topology=topology, node=lambda host: SimpleNamespace(run=run_on(host)))


@pytest.fixture
def capture(monkeypatch):
    """Watch nothing for no time; return the names of watched ports, and what is seen: port numbers and lossy ports."""
    state = SimpleNamespace(ports=[], seen=[], lossy=set())

    class Capturing:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def stop(self):
            proofs = tuple(SimpleNamespace(name=name, is_whole=name not in state.lossy) for name in state.ports)
            return SimpleNamespace(frames=SimpleNamespace(interfaces=tuple(state.ports)), proofs=proofs)

    monkeypatch.setattr(module, "_WATCH_S", 0.0)
    monkeypatch.setattr(module.packet_capture, "start", lambda _, names: state.ports.extend(names) or Capturing())
    monkeypatch.setattr(module.columns, "decode", lambda _: SimpleNamespace(port=state.seen))
    return state


def test_lab_without_a_connected_queue_pair_has_no_workload(capture):
    idle = [*OF_EVERY_PORT, {**READY, "state": "RESET"}, {**READY, "state": "ERR"}]
    assert (
        use_by_others(lab_with({"host1": idle, "host2": "[]", "host3": ""}), soft("link.down", "rtsw1:ctsw1")) is None
    )
    assert not capture.ports


@pytest.mark.parametrize("kind", ["RC", "UC", "UD"])
def test_queue_pair_of_a_process_is_a_workload_and_a_datagram_one_of_the_kernel_is_none(capture, kind):
    planned = soft("link.down", "host1:rxe0")
    of_kernel = {key: value for key, value in READY.items() if key != "pid"} | {"comm": "nvme_rdma"}
    assert use_by_others(lab_with({"host1": [READY | {"type": kind}]}), planned).rnics == ("host1:rxe0",)
    use = use_by_others(lab_with({"host1": [of_kernel | {"type": kind}]}), planned)
    assert (use is None) == (kind == "UD")


def test_uplink_is_used_if_packets_are_seen_on_it(capture):
    lab, planned = (
        lab_with({"host1": [READY], "host3": [{**READY, "ifname": "rxe1"}]}),
        soft("link.down", "rtsw1:ctsw1"),
    )
    capture.seen = [0]
    use = use_by_others(lab, planned)
    assert use.rnics == ("host1:rxe0", "host3:rxe1")
    assert "host1:gpu0" in use.gpus
    assert use.watched == {"rtsw1:ctsw1": True}
    assert use.unread == ()
    capture.seen.clear()
    assert use_by_others(lab, planned).watched == {"rtsw1:ctsw1": False}


def test_capture_that_lost_packets_shows_no_silence(capture):
    capture.lossy.add("rtsw1:ctsw1")
    assert use_by_others(lab_with({"host1": [READY]}), soft("link.down", "rtsw1:ctsw1")).watched == {}


def test_all_candidates_and_all_uplinks_of_a_switch_are_watched(capture):
    lab = lab_with({"host1": [READY]})
    assert len(use_by_others(lab, soft("link.flap", "used-uplink[0]")).watched) == 4
    capture.ports.clear()
    assert set(use_by_others(lab, soft("switch.reboot", "ctsw1")).watched) == {"rtsw1:ctsw1", "rtsw2:ctsw1"}
    capture.ports.clear()
    assert use_by_others(lab, soft("link.down", "host1:rxe0")).watched == {}
    assert not capture.ports


@pytest.mark.parametrize("printed", [CommandFailed("no rdma"), "{}garbage", '[{"ifname": "rxe0"}]', "[1]", "null"])
def test_host_that_cannot_list_its_queue_pairs_is_unread(capture, printed):
    use = use_by_others(lab_with({"host2": printed}), soft("link.down", "host1:rxe0"))
    assert (use.unread, use.rnics) == (("host2",), ())


def test_switches_that_forward_in_an_asic_leave_the_paths_unknown(capture):
    asic = dataclasses.replace(SOFT, switches=tuple(dataclasses.replace(one, carrier=None) for one in SOFT.switches))
    use = use_by_others(lab_with({"host1": [READY]}, asic), soft("link.down", "rtsw1:ctsw1"))
    assert use.watched == {}
    assert "packets could not be watched: rtsw1 forwards in an ASIC" in use.unknown_paths
