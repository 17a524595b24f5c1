"""The holder and its guardian as real processes: whichever dies, the revert runs.

The target is a QMP socket that records its commands; guests are covered by tests/soft.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from held import holder_pid, send_request
from holder_requests import TTL_S, prepare
from house import HOUSE
from qmp_server import Qemu
from waiting import until

from faultbed.inject.leases.channels import open_holder
from faultbed.inject.node import commands, holder
from faultbed.inject.node.actuator import Actuator
from faultbed.inject.node.commands import CommandsActuator
from faultbed.inject.node.qmp import DEADLINE_S, QmpActuator
from faultbed.inject.node.qmp import execute as qmp_execute
from faultbed.testbed.errors import Unreachable
from faultbed.testbed.observe import clock


def arm(channel, qemu):
    """Arm the fault and check that it is active, so that a later check sees its end."""
    assert send_request(channel, "arm")["readback"]["applied"]
    assert qemu.links[-1] is False


def test_holder_arms_observes_and_clears_a_fault(held, qemu, tmp_path):
    """Each step replies with its readback, and the stored revert exists exactly as long as the fault."""
    stored = tmp_path / "t.revert"
    assert prepare(held, tmp_path)["event"] == "prepared"
    assert not stored.exists()
    armed = send_request(held, "arm")
    assert armed["readback"]["applied"]
    assert qemu.links[-1] is False
    assert stored.exists()
    assert send_request(held, "observe")["count"] == 1
    cleared = send_request(held, "clear")
    assert cleared["ok"]
    assert qemu.links[-1] is True
    assert not stored.exists()
    assert send_request(held, "clear") == cleared
    assert [on for _, on in cleared["observed"]["edges"]] == [True, False]


def test_holder_window_starts_and_ends_on_the_targets_clock(held, qemu, tmp_path):
    """The fault starts at the given time and ends after the window, both on the target's own clock."""
    offset = clock.measure(held)
    prepare(held, tmp_path, window_s=0.3)
    at_ns = time.monotonic_ns() + 200_000_000
    assert send_request(held, "arm", at_ns=at_ns - offset.offset_ns)["event"] == "scheduled"
    until(lambda: send_request(held, "observe")["state"] == "over", within_s=3)
    edges = send_request(held, "observe")["edges"]
    on_ns, off_ns = (offset.to_controller(at) for at, _ in edges)
    assert 0 <= on_ns - at_ns < 100_000_000
    assert 0.3e9 <= off_ns - at_ns < 0.5e9


def test_holder_flap_train_keeps_its_period(held, qemu, tmp_path):
    """Edges are timed from the beginning of the window: a late edge does not delay the others."""
    late_s = 0.6
    edges = [[k * 0.2 + (0.0 if on else 0.1), on] for k in range(8) for on in (True, False)]
    prepare(held, tmp_path, window_s=2.0, edges=edges)
    qemu.late_s = late_s
    send_request(held, "arm")
    assert qemu.is_asked.wait(10)
    qemu.late_s = 0.0
    until(lambda: send_request(held, "observe")["state"] == "over", within_s=10)
    observed = send_request(held, "observe")
    assert observed["count"] == 8
    first_ns, *_, last_ns = [at_ns for at_ns, on in observed["edges"] if on]
    assert abs(last_ns - first_ns - 7 * 200_000_000) < late_s * 1e9 / 2


def test_holder_reverts_at_the_end_of_its_channel(held, qemu, tmp_path):
    """When the controller dies, its end of the pipe is closed."""
    prepare(held, tmp_path)
    arm(held, qemu)
    held.close()
    assert qemu.links[-1] is True
    assert not (tmp_path / "t.revert").exists()


def test_holder_reverts_without_heartbeats(held, qemu, tmp_path):
    """Without heartbeats for the length of the lease, the link is restored although the channel is open."""
    prepare(held, tmp_path)
    arm(held, qemu)
    assert until(lambda: qemu.links[-1] is True, within_s=TTL_S + 2) > TTL_S / 2


def test_holder_keeps_the_fault_while_it_gets_heartbeats(held, qemu, tmp_path):
    """Heartbeats renew the lease."""
    prepare(held, tmp_path)
    arm(held, qemu)
    end = time.monotonic() + 2 * TTL_S
    until(lambda: send_request(held, "beat")["state"] == "active" and time.monotonic() > end, within_s=3 * TTL_S)
    assert qemu.links[-1] is False


def test_prepare_of_a_second_fault_does_not_change_the_link(held, qemu, tmp_path):
    """Preparing only reads: a link that another fault holds down stays down."""
    prepare(held, tmp_path)
    assert qemu.links == []


def test_guardian_waits_for_a_holder_that_waits_for_qemu(qemu, tmp_path):
    """QEMU answers shortly before its deadline. The holder is alive meanwhile, and its fault must stay."""
    qemu.mute_s = 0.9 * DEADLINE_S
    lab, planned = SimpleNamespace(state_dir=tmp_path), SimpleNamespace(place=SimpleNamespace(local=True))
    channel = open_holder(lab, planned, instance="t", ttl_s=10.0)
    try:
        assert channel.receive(timeout_s=30)["event"] == "ready"
        prepare(channel, tmp_path, ttl_s=10.0)
        arm(channel, qemu)
        assert qemu.links == [False]
    finally:
        channel.close()
    assert qemu.links[-1] is True


def test_qmp_request_to_a_monitor_that_only_sends_events_ends_at_its_deadline(tmp_path):
    """Events are not replies, so the deadline must hold for the whole command, not for each message."""
    talking = threading.Event()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(tmp_path / "qmp"))
        server.listen()

        def talk():
            client, _ = server.accept()
            with client, contextlib.suppress(OSError):
                while not talking.wait(0.05):
                    client.sendall(b'{"event": "X"}\n')

        thread = threading.Thread(target=talk, daemon=True)
        thread.start()
        with pytest.raises(OSError, match=r"did not answer query-status within 0\.3 s"):
            qmp_execute(str(tmp_path / "qmp"), "query-status", timeout_s=0.3)
        talking.set()
        thread.join(timeout=5)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_guardian_reverts_for_a_killed_or_stopped_holder(held, qemu, tmp_path, how):
    """The stored revert runs and is then removed."""
    prepare(held, tmp_path)
    arm(held, qemu)
    assert (tmp_path / "t.revert").exists()
    os.kill(holder_pid(held), how)
    until(lambda: qemu.links[-1] is True, within_s=TTL_S + 2)
    until(lambda: not (tmp_path / "t.revert").exists(), within_s=2)


@pytest.mark.parametrize("folder", ["my labs", "o'brien"])
def test_stored_revert_of_a_link_works_from_folders_with_any_name(tmp_path, folder):
    """A space or an apostrophe in the path of the socket, or of our own code, broke the only revert that was left."""
    (tmp_path / folder).mkdir()
    server = Qemu(tmp_path / folder / "qmp")
    python = ["env", f"PYTHONPATH={HOUSE}:{tmp_path / folder}", sys.executable, "-P"]
    actuator = QmpActuator(
        host="host1", netdev="be0", socket=str(tmp_path / folder / "qmp"), nic="nic-be0", python=python
    )
    subprocess.run(["sh", "-c", actuator.revert_script()], check=True, timeout=30)
    server.close()
    assert server.links == [True]


def test_holder_without_its_guardian_reverts_at_once(held, qemu, tmp_path):
    """If the holder died next, no process could revert its fault, so it reverts without waiting for its lease."""
    prepare(held, tmp_path, ttl_s=600.0, window_s=600.0)
    arm(held, qemu)
    os.kill(held.guardian_pid, signal.SIGKILL)
    until(lambda: qemu.links[-1] is True)
    until(lambda: not (tmp_path / "t.revert").exists())


@pytest.mark.parametrize(("how", "applied", "count"), [("noop", False, 0), ("lie", True, 1)])
def test_mutant_does_nothing_and_shows_it_in_the_readback(held, qemu, tmp_path, how, applied, count):
    """The readback shows that the action was replaced by a no-op, unless the mutant lies. The link never changes."""
    prepare(held, tmp_path, mutate=how)
    assert send_request(held, "arm")["readback"]["applied"] is applied
    assert send_request(held, "observe")["count"] == count
    assert send_request(held, "clear")["ok"]
    assert False not in qemu.links


def test_holder_refuses_the_impossible_before_any_change(held, qemu, tmp_path):
    """An unknown device, actuator or request gets an error reply, and the holder continues."""
    assert "Device not found" in prepare(held, tmp_path, nic="nic-be9")["error"]
    assert (
        "unknown actuator"
        in send_request(held, "prepare", id="t", revert_dir=str(tmp_path), actuator="magic", args={})["error"]
    )
    assert send_request(held, "dance")["event"] == "error"
    assert send_request(held, "arm")["event"] == "error"
    assert qemu.links == []
    assert send_request(held, "beat")["state"] == "idle"


def test_holder_channel_that_is_closed_raises_unreachable(held):
    """Writing to a holder that is gone is an error, not silence."""
    held.close()
    with pytest.raises(Unreachable):
        held.send({"do": "beat"})


class SetUpFirst(Actuator):
    """An actuator with a set-up before its edge."""

    uses_set_up = True

    def __init__(self, **_):
        self.calls, self.is_on = [], False

    def set_up(self):
        self.calls.append("set_up")

    def prepare(self):
        return {"applied": False}

    def revert_script(self):
        return "true"

    def on(self):
        self.calls.append("on")
        self.is_on = True

    def off(self):
        self.calls.append("off")
        self.is_on = False

    def read(self):
        return {"applied": self.is_on}


@pytest.fixture
def prepared(monkeypatch, tmp_path):
    """Return a prepared holder in this process, whose actuator has a set-up."""
    monkeypatch.setattr(holder, "make", lambda name, args: SetUpFirst())
    made = holder.Holder(1, holder._Watchdog())
    request = {"actuator": "set-up", "args": {}, "edges": [[0.0, True]], "window_s": 60, "ttl_s": 60, "id": "t"}
    assert made.answer({**request, "do": "prepare", "revert_dir": str(tmp_path)})["event"] == "prepared"
    return made


def test_holder_sets_up_when_armed_and_turns_on_when_due(prepared):
    later = time.monotonic_ns() + 10**10
    assert prepared.answer({"do": "arm", "at_ns": later})["event"] == "scheduled"
    assert prepared.actuator.calls == ["set_up"]
    prepared.due(later)
    assert prepared.actuator.calls == ["set_up", "on"]
    assert prepared.answer({"do": "clear"})["ok"]
    assert prepared.actuator.calls == ["set_up", "on", "off"]


def test_holder_reverts_set_up_of_a_fault_that_never_came_due(prepared):
    prepared.answer({"do": "arm", "at_ns": time.monotonic_ns() + 10**10})
    prepared.finish()
    assert prepared.actuator.calls == ["set_up", "off"]
    assert prepared.cleared["ok"]


def test_holder_failed_set_up_is_not_armed_and_leaves_nothing(prepared, monkeypatch):
    def refuse():
        raise OSError("no ifb")

    monkeypatch.setattr(prepared.actuator, "set_up", refuse, raising=False)
    answer = prepared.answer({"do": "arm"})
    assert (answer["event"], answer["error"]) == ("error", "no ifb")
    assert prepared.answer({"do": "clear"})["ok"]
    assert prepared.actuator.calls == ["off"]


def test_holder_first_hit_is_not_stamped_with_the_readbacks_end():
    """A readback on a switch takes 50 ms, in which hundreds of packets pass. All used to get the time of its end."""
    read_ns = []

    class Hop(Actuator):
        def on(self):
            """Change nothing."""

        def hits(self):
            return 3

        def read(self):
            read_ns.append(time.monotonic_ns())
            return {"applied": True}

    one = holder.Holder(-1, watchdog=None)
    one.actuator = Hop()
    one.edge(on=True)
    assert one.hits.count == 3
    assert one.done[0].at_ns <= one.hits.first_ns <= read_ns[0]


def test_holder_first_hit_lies_between_the_two_readings_around_it():
    """Readings and the change take time, so each bound uses the moment that is certain."""
    counts, requests = iter([0, 0, 3, 9]), []

    class Hop(Actuator):
        poll_s = 0.02

        def on(self):
            requests.append(time.monotonic_ns())

        def hits(self):
            requests.append(time.monotonic_ns())
            return next(counts)

        def read(self):
            return {"applied": True}

    one = holder.Holder(-1, watchdog=None)
    one.actuator = Hop()
    before_ns = time.monotonic_ns()
    one.is_on = True
    one.hits.none_before_ns = time.monotonic_ns()
    one.actuator.on()
    for _ in range(4):
        one.sample(time.monotonic_ns())
    first, last = one.hits.between_ns
    _, _, second_look, third_look, fourth_look = requests
    assert before_ns < first <= second_look < third_look <= last < fourth_look
    assert first <= one.hits.first_ns <= last


def test_holder_may_poll_an_actuator_that_then_needs_no_more_polls():
    """A routing scheme is polled only until a comparison that was put off has been made."""

    class Comparison(Actuator):
        poll_s = 0.02

        def on(self):
            """Change nothing."""

        def tick(self, _now_ns):
            self.poll_s = None

        def read(self):
            return {"applied": True}

    one = holder.Holder(-1, watchdog=None)
    one.actuator = Comparison()
    one.is_on = True
    one.due(time.monotonic_ns())
    assert one.actuator.poll_s is None


def test_holder_edge_fires_while_it_is_applied(held, qemu, tmp_path):
    """QEMU needs time to apply a change, so the first bound is before the request."""
    prepare(held, tmp_path)
    qemu.mute_s = 0.3
    send_request(held, "arm")
    qemu.mute_s = 0.0
    observed = send_request(held, "observe")
    first, last = observed["between_ns"]
    assert first == observed["first_ns"] == observed["armed_at_ns"]
    assert last - first >= 0.3e9


def test_holder_fault_that_never_fired_has_no_firing_time(held, qemu, tmp_path):
    prepare(held, tmp_path, mutate="noop")
    send_request(held, "arm")
    assert send_request(held, "observe")["between_ns"] is None


@pytest.mark.parametrize("ends", [True, False])
def test_holder_reports_a_fault_that_something_else_has_ended(tmp_path, ends):
    """The fault's process is killed early, but by its edges the fault was active for its whole window."""
    one = holder.Holder(1, holder._Watchdog())
    args = {"sources": [[None, "127.0.0.1"]], "destination": "127.0.0.1", "rate_bps": 1_000_000, "flows": 1,
            "size_bytes": 1000}  # fmt: skip
    request = {"actuator": "background", "args": args, "edges": [[0.0, True]], "window_s": 60, "ttl_s": 60, "id": "t"}
    one.answer({**request, "do": "prepare", "revert_dir": str(tmp_path)})
    assert one.answer({"do": "arm"})["readback"]["applied"]
    try:
        until(lambda: one.actuator.hits() > 0)
        if ends:
            os.kill(one.actuator._child._pid, signal.SIGKILL)
            until(lambda: not one.actuator.read()["applied"])
    finally:
        cleared = one.answer({"do": "clear"})
    assert cleared["ok"]
    assert [on for _, on in cleared["observed"]["edges"]] == [True, False]
    assert cleared["observed"]["lost"] is ends


class Switched(Actuator):
    """A fault that is a word in memory, which a test can change as another program would."""

    loss_check_s = 0.01

    def __init__(self, **_):
        self.word, self.error = "off", None

    def prepare(self):
        return self.read()

    def revert_script(self):
        return "true"

    def on(self):
        self.word = "on"

    def off(self):
        self.word = "off"

    def read(self):
        if self.error:
            raise OSError(self.error)
        return {"applied": self.word == "on"}


@pytest.fixture
def switched(monkeypatch, tmp_path):
    """Return a function that prepares a holder of a `Switched` fault with these edges."""

    def prepare_switched(edges=((0.0, True),), **attributes):
        monkeypatch.setattr(holder, "make", lambda name, args: Switched())
        one = holder.Holder(1, holder._Watchdog())
        request = {"actuator": "x", "args": {}, "edges": edges, "window_s": 60, "ttl_s": 60, "id": "t"}
        assert one.answer({**request, "do": "prepare", "revert_dir": str(tmp_path)})["event"] == "prepared"
        for name, value in attributes.items():
            setattr(one.actuator, name, value)
        return one

    return prepare_switched


@pytest.mark.parametrize("ends", [True, False])
def test_holder_looks_for_loss_before_each_off_edge_of_a_train(switched, ends):
    """The train ends in its off phase: the holder used to look only while the fault was on at the end."""
    one = switched([[0.0, True], [1.0, False]], loss_check_s=None)
    assert one.answer({"do": "arm"})["readback"]["applied"]
    if ends:
        one.actuator.word = "off"
    one.due(one.start_ns + 10**9)
    observed = one.answer({"do": "clear"})["observed"]
    assert [on for _, on in observed["edges"]] == [True, False]
    assert observed["lost"] is ends


def test_holder_sees_a_fault_that_is_removed_and_put_back(switched):
    """At the end it is on again, and its edges are those of the plan."""
    one = switched()
    one.answer({"do": "arm"})
    one.actuator.word = "off"
    until(lambda: one.due(time.monotonic_ns()) or one.is_lost)
    one.actuator.word = "on"
    one.due(time.monotonic_ns() + 10**9)
    assert one.answer({"do": "clear"})["observed"]["lost"] is True


def test_holder_reports_a_state_that_cannot_be_read_before_the_removal(switched):
    """An unknown state used to count as on."""
    one = switched()
    one.answer({"do": "arm"})
    one.actuator.error = "no such device"
    one.check_for_loss()
    one.actuator.error = None
    one.check_for_loss()
    assert one.unread is None, "a later look has read it"
    one.actuator.error = "no such device"
    observed = one.answer({"do": "clear"})["observed"]
    assert (observed["lost"], observed["unread"]) == (False, "no such device")


def test_holder_does_not_blame_others_for_what_its_own_failed_removal_has_ended(switched, monkeypatch):
    one = switched()
    one.answer({"do": "arm"})

    def fails():
        one.actuator.word = "off"
        raise OSError("timeout")

    monkeypatch.setattr(one.actuator, "off", fails)
    assert not one.answer({"do": "clear"})["ok"]
    monkeypatch.undo()
    cleared = one.answer({"do": "clear"})
    assert cleared["ok"]
    assert cleared["observed"]["lost"] is False


def test_holder_says_why_nothing_shows_the_state_of_a_link_in_qemu(held, qemu, tmp_path):
    prepare(held, tmp_path)
    arm(held, qemu)
    observed = send_request(held, "clear")["observed"]
    assert (observed["lost"], observed["unseen"]) == (False, "QEMU does not report a link's state")


def test_holder_without_a_controller_reverts_before_a_look_that_may_hang(switched, monkeypatch):
    """A vendor's tool that hangs would have kept the fault on for half a minute beyond its lease."""
    one = switched()
    one.answer({"do": "arm"})
    monkeypatch.setattr(one.actuator, "is_lost", lambda: pytest.fail("the removal waits for this"))
    one.end()
    assert one.actuator.word == "off"
    assert one.cleared["ok"]


def test_holder_is_not_cleared_while_its_readback_does_not_show_that_the_fault_is_gone():
    """A readback that shows neither the fault nor its absence counted as cleared."""

    class Kept(Actuator):
        gone = False

        def read(self):
            return {"applied": False, "gone": self.gone}

    one = holder.Holder(-1, watchdog=None)
    one.actuator = Kept()
    assert one.answer({"do": "clear"})["ok"] is False
    one.actuator.gone = True
    assert one.answer({"do": "clear"})["ok"] is True


def test_look_of_a_command_that_hangs_ends_at_its_deadline(monkeypatch):
    monkeypatch.setattr(commands, "_LAST_LOOK_S", 0.2)
    hanging = CommandsActuator(
        on=[], off=[], look=["sleep", "60"], applied="x", normal="y", needs=[], able=[], remember={}, guard=None,
        count=None, settle_s=0.0, shows={},
    )  # fmt: skip
    with pytest.raises(OSError, match=r"did not end within 0\.2 s"):
        hanging.is_lost()
