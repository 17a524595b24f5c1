"""What workloads of other programs use: queue pairs are listed, uplinks are watched, by the machines' watchers."""

from __future__ import annotations

import dataclasses
import threading
from types import SimpleNamespace

import pytest
from planned_faults import SOFT, soft

from faultbed.inject.evidence import use_by_others as module
from faultbed.inject.evidence.use_by_others import use_by_others
from faultbed.testbed.errors import CommandFailed, LabError


class Lab:
    """A lab whose watchers list these RNICs, and notice packets on these links (None: unclear, an error: no answer)."""

    def __init__(self, rnics, *, seen=(), topology=SOFT):
        self.topology, self.rnics = topology, rnics
        self.seen = dict.fromkeys(seen, True) if not isinstance(seen, dict) else seen
        self.tapped, self.untapped, self.error = [], [], None
        self.lock = threading.Lock()

    def netns(self, name):
        return name

    def carrier(self, _name):
        return SimpleNamespace(name="fabric")

    def request(self, machine, request, *, timeout_s):
        assert timeout_s
        if request["do"] == "rnics_in_use":
            if isinstance(listed := self.rnics.get(machine, []), Exception):
                raise listed
            return {"rnics": listed}
        assert machine == "fabric"
        with self.lock:
            if self.error == request["do"]:
                raise LabError("fabric: no packet socket")
            if request["do"] == "tap":
                self.tapped.append(request)
                return {}
            assert request["do"] == "untap"
            self.untapped.append(request["id"])
            (ports,) = (tap["ports"] for tap in self.tapped if tap["id"] == request["id"])
            return {"seen": {} if self.error == "restart" else {name: self.seen.get(name, False) for name in ports}}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(module, "_WATCH_S", 0.0)


def test_lab_without_a_connected_queue_pair_has_no_workload():
    lab = Lab({}, seen=["rtsw1:ctsw1"])
    assert use_by_others(lab, soft("link.down", "rtsw1:ctsw1")) is None
    assert lab.untapped == [tap["id"] for tap in lab.tapped]


def test_uplink_is_used_if_packets_are_seen_on_it():
    planned = soft("link.down", "rtsw1:ctsw1")
    lab = Lab({"host1": ["rxe0"], "host3": ["rxe1", "not-in-the-inventory"]}, seen=["rtsw1:ctsw1"])
    use = use_by_others(lab, planned)
    assert use.rnics == ("host1:rxe0", "host3:rxe1")
    assert "host1:gpu0" in use.gpus
    assert use.watched == {"rtsw1:ctsw1": True}
    assert use.unread == ()
    assert lab.tapped[0]["ports"] == {"rtsw1:ctsw1": ("rtsw1", "ctsw1")}
    lab.seen.clear()
    assert use_by_others(lab, planned).watched == {"rtsw1:ctsw1": False}


def test_link_with_packets_that_may_hide_others_is_unknown():
    use = use_by_others(Lab({"host1": ["rxe0"]}, seen={"rtsw1:ctsw1": None}), soft("link.down", "rtsw1:ctsw1"))
    assert use.watched == {}
    assert "packets on rtsw1:ctsw1 may hide theirs in tunnels" in use.unknown_paths


@pytest.mark.parametrize("failing", ["tap", "untap", "restart"])
def test_watcher_that_fails_or_was_started_again_shows_no_silence(failing):
    lab = Lab({"host1": ["rxe0"]})
    lab.error = failing
    use = use_by_others(lab, soft("link.down", "rtsw1:ctsw1"))
    assert use.watched == {}
    assert "packets could not be watched: fabric: " in use.unknown_paths


def test_all_candidates_and_all_uplinks_of_a_switch_are_watched():
    lab = Lab({"host1": ["rxe0"]})
    assert len(use_by_others(lab, soft("link.flap", "used-uplink[0]")).watched) == 4
    assert set(use_by_others(lab, soft("switch.reboot", "ctsw1")).watched) == {"rtsw1:ctsw1", "rtsw2:ctsw1"}
    lab.tapped.clear()
    assert use_by_others(lab, soft("link.down", "host1:rxe0")).watched == {}
    assert not lab.tapped


@pytest.mark.parametrize("listed", [CommandFailed("no rdma"), LabError("host2: rnics_in_use: no netlink"), None])
def test_host_that_cannot_list_its_queue_pairs_is_unread(listed):
    use = use_by_others(Lab({"host2": listed}), soft("link.down", "host1:rxe0"))
    assert (use.unread, use.rnics) == (("host2",), ())


def test_host_that_does_not_answer_is_unread_after_a_bounded_time(monkeypatch):
    monkeypatch.setattr(module, "_ANSWER_S", 0.2)
    lab, over = Lab({"host1": ["rxe0"]}), threading.Event()
    request = lab.request
    lab.request = lambda machine, *args, **more: (
        over.wait(30) if machine == "host2" else request(machine, *args, **more)
    )
    use = use_by_others(lab, soft("link.down", "host1:rxe0"))
    over.set()
    assert "host2" in use.unread


def test_switches_that_forward_in_an_asic_leave_the_paths_unknown():
    asic = dataclasses.replace(SOFT, switches=tuple(dataclasses.replace(one, carrier=None) for one in SOFT.switches))
    use = use_by_others(Lab({"host1": ["rxe0"]}, topology=asic), soft("link.down", "rtsw1:ctsw1"))
    assert use.watched == {}
    assert "packets could not be watched: rtsw1 forwards in an ASIC" in use.unknown_paths
