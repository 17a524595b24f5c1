"""Claims on a target, with real holders: a second controller is refused, and `heal` ends the holders of faults."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from held import holder_pid, send_request
from local_lab import SOFT, lab_at
from waiting import until

from faultbed.inject import heal as heal_module
from faultbed.inject.fault_plan import plan
from faultbed.inject.injector import Injector
from faultbed.inject.journal import Journal
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.leases.channels import LocalChannel, local_python
from faultbed.inject.leases.lease import Lease
from faultbed.inject.leases.remote_claims import refuse_remote_conflicts
from faultbed.inject.node import claim as claim_module
from faultbed.inject.node.actuator import Refused
from faultbed.inject.node.claim import Claim
from faultbed.inject.node.holder import REVERT_DIR
from faultbed.testbed.backends.soft import lifecycle
from faultbed.testbed.errors import FaultError
from faultbed.testbed.node.holders import discard_all, end_holder, identity, locked, read_claim
from faultbed.testbed.observe import counters, fingerprint

LINK = [{"path": ["host", "host1", "rnic", "rxe0", "link", "l"], "thing": "link l"}]
FLAP = [[second + part, on] for second in range(40) for part, on in ((0.0, True), (0.5, False))]


@contextlib.contextmanager
def holder(tmp_path, name):
    channel = LocalChannel(name, tmp_path / "faults" / f"{name}.revert", watchdog_s=4.5)
    try:
        assert channel.receive(timeout_s=30)["event"] == "ready"
        yield channel
    finally:
        channel.close()


def prepare(channel, tmp_path, name, *, session, edges=None, paths=LINK):
    args = {"host": "host1", "netdev": "be0", "socket": str(tmp_path / "qmp"), "nic": "nic-be0"}
    claim = {
        "paths": paths, "session": session, "kind": f"kind-{name}", "target": "host1:rxe0", "fault": name,
        "controller": f"{session}@there, process 7", "since": "2026-11-25 01:00:00 UTC",
    }  # fmt: skip
    return send_request(
        channel, "prepare", id=name, actuator="qmp", args={**args, "python": local_python()}, window_s=60.0, ttl_s=10,
        edges=edges or [[0.0, True]], revert_dir=str(tmp_path / "faults"), claim=claim,
    )  # fmt: skip


def here(tmp_path):
    """Run the script of `heal` on this machine."""
    return heal_module._heal_local(SimpleNamespace(state_dir=tmp_path), most_s=None)


def test_claim_of_another_session_is_refused_and_names_the_holder(qemu, tmp_path):
    with holder(tmp_path, "a") as first, holder(tmp_path, "b") as second:
        prepare(first, tmp_path, "a", session="anna")
        assert send_request(first, "arm")["readback"]["applied"]
        refused = prepare(second, tmp_path, "b", session="ben")
        assert refused["refused"]
        assert refused["error"] == (
            "link l is held by kind-a on host1:rxe0 (fault a, by anna@there, process 7, since 2026-11-25 01:00:00 UTC);"
            " end that fault first, or run `faultbed heal`"
        )
        assert qemu.links == [False], "the second one has touched the link of the first"
        assert send_request(first, "observe")["on"]
        assert send_request(first, "clear")["ok"]
        assert prepare(second, tmp_path, "b", session="ben")["event"] == "prepared"


def test_claims_of_one_session_do_not_conflict(qemu, tmp_path):
    """An experiment may take one link down twice, and both holders are prepared at its start."""
    with holder(tmp_path, "a") as first, holder(tmp_path, "b") as second:
        prepare(first, tmp_path, "a", session="anna")
        assert prepare(second, tmp_path, "b", session="anna")["event"] == "prepared"


def test_claim_of_a_dead_holder_counts_until_its_revert_has_run(qemu, tmp_path):
    """Guardian and holder are killed, so no process locks the claim, but the link is still down."""
    with holder(tmp_path, "a") as first:
        prepare(first, tmp_path, "a", session="anna")
        send_request(first, "arm")
        pid = holder_pid(first)
        os.kill(pid, signal.SIGSTOP)
        os.kill(first.guardian_pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not claim_module._is_locked(str(tmp_path / "faults" / "a.claim")), within_s=5)
    with holder(tmp_path, "b") as second:
        error = prepare(second, tmp_path, "b", session="ben")["error"]
        assert error.startswith("link l was left changed by kind-a on host1:rxe0")
        assert "ended without a revert; run `faultbed heal`" in error
        assert here(tmp_path) == ["here: healed: ran stored revert a.revert"]
        assert qemu.links[-1] is True
        assert prepare(second, tmp_path, "b", session="ben")["event"] == "prepared"


def test_end_of_a_holder_whose_fault_is_over_does_not_undo_the_next_one(qemu, tmp_path):
    """A holder's change failed and was reverted. When its controller releases it, another fault owns the link."""
    answer, refusals = qemu._answer, [[{"error": {"desc": "no"}}]]
    qemu._answer = lambda *words: refusals.pop() if words[0] == "set_link" and refusals else answer(*words)
    with holder(tmp_path, "b") as second:
        with holder(tmp_path, "a") as first:
            prepare(first, tmp_path, "a", session="anna")
            assert "refused set_link" in send_request(first, "arm")["error"]
            assert send_request(first, "clear")["ok"]
            assert prepare(second, tmp_path, "b", session="ben")["event"] == "prepared"
            assert send_request(second, "arm")["readback"]["applied"]
        assert qemu.links[-1] is False
        assert send_request(second, "clear")["ok"]


def test_heal_ends_a_flap_that_has_more_edges(qemu, tmp_path):
    """After `heal` the holder is gone, no revert is left, and the link stays up."""
    with holder(tmp_path, "a") as flap:
        prepare(flap, tmp_path, "a", session="anna", edges=FLAP)
        send_request(flap, "arm")
        pid = holder_pid(flap)
        lines = here(tmp_path)
        assert lines[0] == "here: healed: ended the holder of kind-a on host1:rxe0"
        assert identity(pid)["started"] is None
        assert qemu.links[-1] is True
        assert list((tmp_path / "faults").iterdir()) == []
        flap._process.wait(timeout=10)
        assert qemu.links[-1] is True


def test_heal_ends_a_fault_that_is_only_prepared(qemu, tmp_path):
    """A prepared fault has no stored revert, and could otherwise be armed after `heal`."""
    with holder(tmp_path, "a") as ready:
        prepare(ready, tmp_path, "a", session="anna")
        assert here(tmp_path) == ["here: healed: ended the holder of kind-a on host1:rxe0"]
        assert ready.receive(timeout_s=10) is None
        assert qemu.links == []


def test_heal_ends_a_fault_whose_holder_has_not_claimed_yet(qemu, tmp_path, monkeypatch):
    """`heal` used to miss a holder that had just been started, and its fault came afterwards."""
    for module, name in ((counters, "read"), (fingerprint, "capture")):
        monkeypatch.setattr(module, name, getattr(module, name))  # restores what `lab_at` replaces
    lab, begin = lab_at(tmp_path), Lease.begin

    def healed_meanwhile(lease):
        begin(lease)
        assert here(tmp_path) == []

    monkeypatch.setattr(Lease, "begin", healed_meanwhile)
    with Journal(tmp_path / "journal") as journal, Injector(lab, journal) as injector:
        with pytest.raises(FaultError, match="`faultbed heal` was run while this fault was prepared"):
            injector.prepare(planned_of("link.flap", "host1:rxe0"))
        monkeypatch.setattr(Lease, "begin", begin)
        prepared = injector.prepare(planned_of("link.flap", "host1:rxe0"))
        assert prepared.arm().ok
    assert qemu.links[-1] is True


@pytest.mark.parametrize("how", ["removed", "emptied"])
def test_claim_that_is_gone_or_broken_counts_as_one_of_everything(qemu, tmp_path, how):
    with holder(tmp_path, "a") as first, holder(tmp_path, "b") as second:
        prepare(first, tmp_path, "a", session="anna")
        send_request(first, "arm")
        claim = tmp_path / "faults" / "a.claim"
        claim.unlink() if how == "removed" else os.truncate(claim, 0)
        refused = prepare(second, tmp_path, "b", session="ben")
        assert refused["refused"]
        assert "a.claim: this claim does not name what its fault changes; run `faultbed heal`" in refused["error"]
        assert send_request(first, "clear")["ok"]
        assert prepare(second, tmp_path, "b", session="ben")["event"] == "prepared"


@pytest.mark.parametrize("how", ["removed", "emptied"])
def test_heal_ends_a_flap_whose_claim_is_gone_or_broken(qemu, tmp_path, how):
    """The stored revert also names the holder, so `heal` does not depend on the claim."""
    with holder(tmp_path, "a") as flap:
        prepare(flap, tmp_path, "a", session="anna", edges=FLAP)
        send_request(flap, "arm")
        pid, claim = holder_pid(flap), tmp_path / "faults" / "a.claim"
        claim.unlink() if how == "removed" else os.truncate(claim, 0)
        assert here(tmp_path)[0].startswith("here: healed: ended the holder of ")
        assert identity(pid)["started"] is None
        flap._process.wait(timeout=10)
        assert qemu.links[-1] is True
        assert list((tmp_path / "faults").iterdir()) == []


def test_fault_whose_claim_is_gone_does_not_begin(qemu, tmp_path):
    """Without its claim `heal` would not find the holder, and a second fault would be allowed next to it."""
    with holder(tmp_path, "a") as ready:
        prepare(ready, tmp_path, "a", session="anna")
        (tmp_path / "faults" / "a.claim").unlink()
        refused = send_request(ready, "arm")
        assert refused["refused"]
        assert "a.claim: this fault's claim was removed" in refused["error"]
        assert list((tmp_path / "faults").iterdir()) == []
    assert qemu.links == []


def test_claim_is_complete_although_the_disk_takes_parts(tmp_path, monkeypatch):
    """A truncated claim would protect nothing."""
    write = os.write
    monkeypatch.setattr(claim_module.os, "write", lambda fd, data: write(fd, data[:7]))
    claim = Claim.acquire(str(tmp_path / "a.revert"), {"session": "a", "paths": LINK})
    assert read_claim(str(tmp_path / "a.claim"))["paths"] == LINK
    claim.release()


def test_heal_waits_for_a_running_revert(tmp_path):
    """If two processes revert, the one with the lock acts, and the other one then finds nothing to do."""
    folder = tmp_path / "faults"
    claim = Claim.acquire(str(folder / "a.revert"), {})
    (folder / "a.revert").write_text("exit 1")
    # This process stands for a guardian that runs the revert: it has the lock, and the claim names another process.
    (folder / "a.claim").write_text("{}")
    reverting = subprocess.Popen(
        [sys.executable, "-c", "import sys, os; sys.stdin.read(1); os.unlink(sys.argv[1]); os.unlink(sys.argv[2])",
         str(folder / "a.revert"), str(folder / "a.claim")],
        stdin=subprocess.PIPE, pass_fds=(claim._fd,),
    )  # fmt: skip
    os.close(claim._fd)
    with (
        pytest.raises(TimeoutError, match="is locked by another process"),
        locked(str(folder / "a.claim"), within_s=0.1),
    ):
        pass
    reverting.communicate(b".", timeout=10)
    assert here(tmp_path) == []


def test_end_holder_with_a_reused_pid_kills_nothing(tmp_path):
    """A process with the same id and another start time is another process."""
    claim = Claim.acquire(str(tmp_path / "a.revert"), {})
    path = tmp_path / "a.claim"
    with subprocess.Popen(["sleep", "60"]) as other:
        output = read_claim(str(path))
        path.write_text(path.read_text().replace(f'"pid": {output["pid"]}', f'"pid": {other.pid}'))
        assert end_holder(str(path)) is False
        assert other.poll() is None
        other.kill()
    claim.release()
    assert not path.exists()


@pytest.mark.parametrize(
    ("mine", "theirs", "collide"),
    [
        (["switch", "rtsw1"], ["switch", "rtsw1", "link", "l"], True),
        (["switch", "rtsw1", "link", "l"], ["switch", "rtsw1"], True),
        (["switch", "rtsw1", "p1", "nft", "faultbed_a"], ["switch", "rtsw1", "p1", "nft", "faultbed_b"], False),
        (["switch", "rtsw1"], ["switch", "rtsw2"], False),
        (["host", "host1", "rnic", "rxe0"], ["host", "host1", "rnic", "rxe1"], False),
    ],
)
def test_claims_conflict_if_equal_or_nested(tmp_path, mine, theirs, collide):
    claim = Claim.acquire(str(tmp_path / "a.revert"), {"session": "a", "paths": [{"path": theirs, "thing": "theirs"}]})
    actual = {"session": "b", "paths": [{"path": mine, "thing": "mine"}]}
    with pytest.raises(Refused) if collide else contextlib.nullcontext():
        Claim.acquire(str(tmp_path / "b.revert"), actual).release()
    claim.release()
    Claim.acquire(str(tmp_path / "b.revert"), actual).release()
    assert list(tmp_path.iterdir()) == []


def test_injector_claims_what_the_planner_compares(tmp_path):
    """Two controllers that plan the same fault claim the same paths, each with its own session."""
    lab = SimpleNamespace(topology=SOFT.topology, state_dir=tmp_path)
    planned = plan(FaultSpec(kind="link.flap", target="host1:rxe0", for_s=5.0), SOFT.topology, lab_kind="soft")
    one, two = (Injector(lab, journal=None).claim_of(planned) for _ in range(2))
    assert one["paths"] == two["paths"]
    assert any(each["path"][:4] == ["host", "host1", "rnic", "rxe0"] for each in one["paths"])
    assert one["session"] != two["session"]


@pytest.mark.parametrize("how", ["reset", "down"])
def test_reset_and_down_end_local_holders_before_the_vms(qemu, tmp_path, monkeypatch, how):
    """A manual flap used to continue on the new VMs, whose sockets have the same paths, without a stored revert."""
    states = []
    state, snapshot = SimpleNamespace(key="k", accelerator="tcg", vms={}), SimpleNamespace(key="k", complete=True)
    for name, value in {
        "lab_dir": lambda _: tmp_path, "_check_owner": lambda _: None, "read_state": lambda _: state,
        "read_snapshot": lambda _: snapshot, "_remove_sockets": lambda _: None, "vms": lambda *_: (),
        "_resume": lambda *_, **__: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(lifecycle, name, value)
    monkeypatch.setattr(lifecycle.image, "cached", object)
    with holder(tmp_path, "a") as flap:
        prepare(flap, tmp_path, "a", session="anna", edges=FLAP)
        send_request(flap, "arm")
        pid = holder_pid(flap)

        def end(_vms, _state):
            states.extend([identity(pid)["started"], *fingerprint.stored_reverts(tmp_path).iterdir()])
            return 0

        monkeypatch.setattr(lifecycle.fleet, "end", end)
        getattr(lifecycle, how)(*(SOFT, print)[: 2 if how == "reset" else 1])
        assert states == [None]
        flap._process.wait(timeout=10)


def planned_of(kind, target, **params):
    return plan(FaultSpec(kind=kind, target=target, for_s=5.0, params=params), SOFT.topology, lab_kind="soft")


def two_places(tmp_path):
    """Return a soft lab whose guests have their claims and stored reverts in the folder `guest`."""
    requests = []

    def run(argv, **_):
        requests.append(argv)
        here = [word.replace(REVERT_DIR, str(tmp_path / "guest")) for word in argv]
        return subprocess.run(here, check=True, capture_output=True, text=True)

    lab = SimpleNamespace(
        kind="soft", topology=SOFT.topology, state_dir=tmp_path, node=lambda _: SimpleNamespace(run=run)
    )
    return lab, requests


def test_fault_in_a_guest_is_refused_during_a_reboot_by_a_different_session(tmp_path):
    """The reboot's claim is beside QEMU, so the guest itself does not show it."""
    lab, _ = two_places(tmp_path)
    outside, inside = planned_of("host.reboot", "host1"), planned_of("gpu.throttle", "host1:gpu0", percent=50)
    mine, theirs = (Injector(lab, journal=None).claim_of(fault) for fault in (inside, outside))
    claim = Claim.acquire(str(tmp_path / "faults" / "a.revert"), theirs)
    with pytest.raises(FaultError, match=r"gpu.throttle: .* is held by host\.reboot on host1"):
        refuse_remote_conflicts(lab, inside, mine, where="gpu.throttle")
    refuse_remote_conflicts(lab, inside, {**mine, "session": theirs["session"]}, where="gpu.throttle")
    other = planned_of("gpu.throttle", "host2:gpu0", percent=50)
    refuse_remote_conflicts(lab, other, Injector(lab, journal=None).claim_of(other), where="gpu.throttle")
    claim.release()
    refuse_remote_conflicts(lab, inside, mine, where="gpu.throttle")


@pytest.mark.parametrize("kind", ["host.reboot", "host.freeze"])
def test_whole_host_fault_is_refused_during_a_fault_inside_the_host(tmp_path, kind):
    """A claim that its holder could not finish, on a full disk, hid the one that was read after it."""
    inside, outside = planned_of("gpu.throttle", "host1:gpu0", percent=50), planned_of(kind, "host1")
    lab, request = two_places(tmp_path)
    mine, theirs = (Injector(lab, journal=None).claim_of(fault) for fault in (outside, inside))
    refuse_remote_conflicts(lab, outside, mine, where=kind)
    guest = tmp_path / "guest"
    guest.mkdir()
    (guest / "a.claim").write_text('{"paths": [{"pa')
    refuse_remote_conflicts(lab, outside, mine, where=kind)
    (guest / "b.claim").write_text(f"{json.dumps(theirs)}\n")
    with pytest.raises(FaultError, match=r"is held by gpu\.throttle on host1:gpu0"):
        refuse_remote_conflicts(lab, outside, mine, where=kind)
    refuse_remote_conflicts(lab, outside, {**mine, "session": theirs["session"]}, where=kind)
    assert request


@pytest.mark.parametrize("claim", [None, "", '{"paths": [{"pa'], ids=["missing", "empty", "cut off"])
def test_whole_host_fault_is_refused_if_a_stored_revert_in_the_guest_does_not_say_what_it_holds(tmp_path, claim):
    lab, _ = two_places(tmp_path)
    guest = tmp_path / "guest"
    guest.mkdir()
    (guest / "a.revert").write_text("true\n")
    if claim is not None:
        (guest / "a.claim").write_text(claim)
    planned = planned_of("host.reboot", "host1")
    with pytest.raises(FaultError, match=r"a\.revert on host1 does not name what its fault changes"):
        refuse_remote_conflicts(lab, planned, Injector(lab, journal=None).claim_of(planned), where="host.reboot")


def test_fault_of_a_link_queries_no_guest(tmp_path):
    """An SSH round trip is slow under emulation, and no fault inside a guest can collide with a link fault."""
    lab, request = two_places(tmp_path)
    planned = planned_of("link.flap", "host1:rxe0")
    refuse_remote_conflicts(lab, planned, Injector(lab, journal=None).claim_of(planned), where="link.flap")
    assert request == []


def test_holder_with_a_claim_and_no_stored_revert_is_ended_with_the_lab(tmp_path):
    """Such a holder has prepared its fault and arms it next. A reset used to remove the claim and leave the holder."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as holder:
        (tmp_path / "x.claim").write_text(json.dumps(identity(holder.pid)))
        discard_all(str(tmp_path))
        assert holder.wait(10) == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def test_stored_reverts_are_discarded_in_a_folder_whose_name_is_a_pattern(tmp_path):
    """With FAULTBED_HOME=/srv/lab[1], a reset neither ended the holders of faults nor discarded their reverts."""
    folder = tmp_path / "lab[1]"
    folder.mkdir()
    for name in ("x.revert", "y.claim"):
        (folder / name).touch()
    discard_all(str(folder))
    assert not list(folder.iterdir())
