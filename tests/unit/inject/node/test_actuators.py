"""Actuators that need no lab: stopped, killed and busy processes, limits, memory, and datagrams."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from house import HOUSE
from waiting import until

from faultbed.inject.node.actuator import Refused
from faultbed.inject.node.machine import limit, memory, service
from faultbed.inject.node.machine import process as process_module
from faultbed.inject.node.machine.cgroup import CgroupActuator
from faultbed.inject.node.machine.hog import HogActuator
from faultbed.inject.node.machine.memory import MemoryActuator
from faultbed.inject.node.machine.process import ProcessActuator
from faultbed.inject.node.machine.service import ServiceActuator
from faultbed.inject.node.network import frr, latereceives
from faultbed.inject.node.network.background import BackgroundActuator
from faultbed.inject.node.network.packet_rules import HopActuator, psn_of


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "600"])
    # Popen returns when exec closes its descriptors, just before the kernel sets the process name (fs/exec.c).
    until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n")
    yield process
    process.kill()
    process.wait(timeout=10)


def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def process_key(sleeper):
    return {"pid": sleeper.pid, "comm": "sleep"}


def test_process_actuator_stops_and_continues_a_process(sleeper):
    """STOP and CONT are read back; a repeated request changes nothing."""
    actuator = ProcessActuator(find=process_key(sleeper), how="STOP")
    assert not actuator.prepare()["applied"]
    actuator.on()
    assert actuator.read()["applied"]
    assert state(sleeper.pid) == "T"
    for _ in range(2):
        actuator.off()
        assert not actuator.read()["applied"]


def test_killed_daemon_whose_number_another_program_has_got_is_started_again(sleeper, monkeypatch, tmp_path):
    """The pid in the daemon's pid file belongs to another program. The daemon used to count as running."""
    (tmp_path / "sw").mkdir()
    pidfile, daemon, log = tmp_path / "sw" / "bgpd.pid", tmp_path / "bgpd", tmp_path / "log"
    shutil.copy("/bin/sleep", daemon)
    process = subprocess.Popen([daemon, "600"])
    until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "bgpd\n")
    pidfile.write_text(f"{process.pid}\n")
    monkeypatch.setattr(process_module, "FRR_DIR", str(tmp_path))
    monkeypatch.setattr(process_module, "enter_netns", lambda _netns: None)
    monkeypatch.setattr(process_module, "unless_gone", lambda _netns, script: script)  # there is no namespace here
    monkeypatch.setattr(process_module, "_restart", lambda _netns, _pid: f"echo started >> {log}")
    actuator = ProcessActuator(find={"daemons": ["bgpd"]}, how="KILL", netns="sw", again=True)
    assert not actuator.prepare()["applied"]
    reaper = threading.Thread(target=process.wait)
    reaper.start()
    actuator.on()
    reaper.join()
    pidfile.write_text(f"{sleeper.pid}\n")
    assert actuator.read()["applied"]
    actuator.off()
    subprocess.run(["sh", "-c", actuator.revert_script()], check=True)
    assert log.read_text() == "started\n" * 2


@pytest.fixture
def daemon(monkeypatch, tmp_path):
    """Start a daemon `bgpd` of the switch `sw`, with a pid file; `_restart` starts another one in its place."""
    (tmp_path / "sw").mkdir()
    pidfile, program = tmp_path / "sw" / "bgpd.pid", tmp_path / "bgpd"
    shutil.copy("/bin/sleep", program)
    # A daemon has no parent that would have to collect it.
    start = f"setsid sh -c '{program} 600 </dev/null >/dev/null 2>&1 & echo $! >{pidfile}'"
    monkeypatch.setattr(process_module, "FRR_DIR", str(tmp_path))
    monkeypatch.setattr(process_module, "enter_netns", lambda _netns: None)
    monkeypatch.setattr(process_module, "unless_gone", lambda _netns, script: script)
    monkeypatch.setattr(process_module, "_restart", lambda _netns, _pid: start)
    subprocess.run(["sh", "-c", start], check=True)

    def pid():
        until(lambda: process_module._alive(str(pidfile)))
        return int(pidfile.read_text())

    yield pid
    os.kill(pid(), 9)


@pytest.mark.parametrize("how", ["KILL", "STOP"])
def test_second_fault_of_a_daemon_hits_the_one_that_the_first_fault_has_started(daemon, how):
    """A run prepares all its faults before the first one; the second one signalled a process that was gone."""
    daemon()
    first = ProcessActuator(find={"daemons": ["bgpd"]}, how="KILL", netns="sw", again=True)
    second = ProcessActuator(find={"daemons": ["bgpd"]}, how=how, netns="sw", again=how == "KILL")
    first.prepare()
    second.prepare()
    revert = second.revert_script()
    first.on()
    first.off()
    restarted = daemon()
    second.on()
    assert second.read()["applied"]
    if how == "STOP":
        subprocess.run(["sh", "-c", revert], check=True)
    else:
        second.off()
    assert (daemon() == restarted) is (how == "STOP")
    assert state(daemon()) != "T"
    second.off()
    assert not second.read()["applied"]


def test_fault_of_a_daemon_that_has_ended_meanwhile_is_refused(daemon):
    pid = daemon()
    actuator = ProcessActuator(find={"daemons": ["bgpd"]}, how="KILL", netns="sw", again=True)
    actuator.prepare()
    os.kill(pid, 9)
    until(lambda: process_module._stat(pid) is None)
    with pytest.raises(Refused, match="any more"):
        actuator.on()
    actuator.off()


@pytest.mark.parametrize("before", [0, 9])
def test_bgp_reset_counts_from_its_own_moment(monkeypatch, before):
    """An earlier fault of the run that restarts bgpd sets the count to 0, and one that drops sessions raises it."""
    dropped = [5]

    def vtysh(argv):
        summary = {"peers": {"ctsw1": {"state": "Established", "connectionsDropped": dropped[0]}}}
        dropped[0] += "clear bgp *" in argv and is_obeyed
        return json.dumps(summary) if any("summary" in word for word in argv) else ""

    monkeypatch.setattr(frr, "run", vtysh)
    for is_obeyed in (True, False):
        dropped[0] = 5
        reset = frr.BgpResetActuator(netns="sw")
        reset.prepare()
        dropped[0] = before
        reset.on()
        assert reset.read()["applied"] is is_obeyed


def test_process_stored_revert_continues_it_any_number_of_times(sleeper):
    """The script is idempotent, whichever process runs it."""
    actuator = ProcessActuator(find=process_key(sleeper), how="STOP")
    actuator.prepare()
    actuator.on()
    until(lambda: state(sleeper.pid) == "T")
    for _ in range(3):
        assert subprocess.run(["sh", "-c", actuator.revert_script()], check=False, timeout=20).returncode == 0
    until(lambda: state(sleeper.pid) != "T")


def test_process_stored_revert_never_signals_a_reused_pid(sleeper):
    """A pid given to another process has another start time, and that process is left alone."""
    actuator = ProcessActuator(find=process_key(sleeper), how="STOP")
    actuator.prepare()
    script = actuator.revert_script()
    started = Path(f"/proc/{sleeper.pid}/stat").read_text().rpartition(")")[2].split()[19]
    os.kill(sleeper.pid, 19)
    until(lambda: state(sleeper.pid) == "T")
    subprocess.run(["sh", "-c", script.replace(f"= {started} ", f"= {int(started) + 1} ")], check=False, timeout=20)
    assert state(sleeper.pid) == "T"
    subprocess.run(["sh", "-c", script], check=True, timeout=20)
    until(lambda: state(sleeper.pid) != "T")


def test_process_actuator_killed_process_stays_gone(sleeper):
    """The death of a rank cannot be reverted. "Cleared" means that the fault no longer acts."""
    actuator = ProcessActuator(find=process_key(sleeper), how="KILL")
    actuator.prepare()
    actuator.on()
    assert actuator.read()["applied"]
    actuator.off()
    assert not actuator.read()["applied"]
    assert actuator.read()["states"] == {str(sleeper.pid): "gone"}
    assert subprocess.run(["sh", "-c", actuator.revert_script()], check=False, timeout=20).returncode == 0


def test_kill_of_a_rank_that_has_ended_by_itself_meanwhile_is_refused(sleeper):
    """The rank had crashed seconds before the fault: nothing was killed, and the fault counted as fired and proven."""
    actuator = ProcessActuator(find=process_key(sleeper), how="KILL")
    actuator.prepare()
    sleeper.kill()
    until(lambda: process_module._stat(sleeper.pid) is None)
    with pytest.raises(Refused, match="ended by itself"):
        actuator.on()
    actuator.off()
    assert not actuator.read()["applied"]


def test_loss_of_a_service_that_has_ended_by_itself_meanwhile_is_refused(monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(service, "run", ran.append)
    actuator = ServiceActuator(unit="faultbed-gpu0.service", cgroup=str(tmp_path))
    (tmp_path / "cgroup.procs").write_text("17\n")
    actuator.prepare()
    (tmp_path / "cgroup.procs").write_text("")
    with pytest.raises(Refused, match="ended by itself"):
        actuator.on()
    assert ran == []


def test_process_actuator_refuses_a_missing_foreign_or_stopped_process(sleeper):
    """No such process, another program under its pid, or one that is already stopped."""
    with pytest.raises(Refused, match="no process"):
        ProcessActuator(find={"argument": "no.such.module"}, how="KILL").prepare()
    with pytest.raises(Refused, match="no process"):
        ProcessActuator(find={"pid": sleeper.pid, "comm": "qemu"}, how="STOP").prepare()
    os.kill(sleeper.pid, 19)
    until(lambda: state(sleeper.pid) == "T")
    with pytest.raises(Refused, match="stopped already"):
        ProcessActuator(find=process_key(sleeper), how="STOP").prepare()


def test_stored_revert_of_a_limit_moves_no_process_that_is_not_in_its_group(monkeypatch, tmp_path):
    """Another program may have got the number of a rank that has ended: it was moved into the ranks' group."""
    group, home = tmp_path / "limit.service", tmp_path / "ranks"
    for folder in (tmp_path, group, home):
        folder.mkdir(exist_ok=True)
        (folder / "cgroup.procs").touch()
    monkeypatch.setattr(limit, "ROOT", str(tmp_path))
    actuator = limit.LimitActuator(argument="x", cgroup=str(group), value="max")
    actuator._homes = {11: "/ranks", 12: "/ranks", 13: "/gone"}
    (group / "cgroup.procs").write_text("12\n13\n")
    subprocess.run(["sh", "-c", actuator.revert_script()], check=False, stderr=subprocess.DEVNULL)
    assert (home / "cgroup.procs").read_text() == "12\n"
    assert (tmp_path / "cgroup.procs").read_text() == "13\n"


def test_hog_actuator_starts_and_ends_its_busy_processes():
    """/proc shows the requested number during the fault and none afterwards."""
    actuator = HogActuator(count=2, share=0.1)
    assert not actuator.prepare()["applied"]
    actuator.on()
    assert actuator.read()["hogs"] == 2
    with pytest.raises(Refused, match="heal"):
        HogActuator(count=1, share=0.1).prepare()
    actuator.off()
    assert not actuator.read()["applied"]


def test_hog_ends_with_the_process_that_started_it():
    """A killed holder leaves no busy process."""
    code = (
        "import sys; from faultbed.inject.node.machine import hog; one = hog.HogActuator(count=1, share=0.1); one.on();"
        "print(*hog.busy_processes(), flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(HOUSE)},
    )
    hog = int(parent.stdout.readline())
    assert state(hog) != "Z"
    parent.kill()
    parent.communicate(timeout=10)
    until(lambda: not Path(f"/proc/{hog}").exists() or state(hog) == "Z")


@pytest.fixture
def cgroup(tmp_path):
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "cpu.stat").write_text("nr_throttled 0\n")
    (tmp_path / "cgroup.procs").write_text("1\n")
    return tmp_path


def test_cgroup_limit_swings_around_its_middle(cgroup):
    """The limit is a sine that starts in the middle and rises first. It is reverted like any other limit."""
    actuator = CgroupActuator(cgroup=str(cgroup), value="7000 10000", swing_us=2000, wave_s=4.0)
    actuator.prepare()
    actuator.on()
    begin = time.monotonic_ns()
    for at_s in (0.0, 1.0, 2.0, 3.0):
        actuator.tick(begin + int(at_s * 1e9))
        quota, period = actuator.read()["cpu.max"].split()
        assert period == "10000"
        assert int(quota) == pytest.approx(7000 + 2000 * math.sin(at_s * math.pi / 2), abs=40)
        assert actuator.read()["applied"]
    actuator.off()
    assert not actuator.read()["applied"]


def test_background_actuator_sends_datagrams_until_it_is_off():
    """Datagrams are marked, counted and paced, and none is sent after the end; the child process is gone."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.setsockopt(socket.IPPROTO_IP, socket.IP_RECVTOS, 1)
        listener.settimeout(20)
        actuator = BackgroundActuator(
            sources=[(None, "127.0.0.1")], destination="127.0.0.1", rate_bps=8_000_000, flows=2, size_bytes=1000
        )
        assert not actuator.prepare()["applied"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("faultbed.inject.node.network.background._DISCARD", listener.getsockname()[1])
            actuator.on()
        assert actuator.read()["applied"]
        datagrams = [listener.recvmsg(2000, 100) for _ in range(20)]
        sender = Path(f"/proc/{actuator._child._pid}")
        assert sender.exists()
        actuator.off()
    assert {len(data) for data, *_ in datagrams} == {1000 - 28}
    assert {ancillary[0][2][0] for _, ancillary, *_ in datagrams} == {1}
    assert len({came_from for *_, came_from in datagrams}) == 2
    sent = actuator.hits()
    # The last datagram may have arrived before its sender, which is dead by now, could count it.
    assert sent >= 19
    assert not actuator.read()["applied"]
    assert not sender.exists(), "no process is left that could send"


def test_background_actuator_refuses_an_address_of_another_machine():
    with pytest.raises(Refused, match=r"192\.0\.2\.1"):
        BackgroundActuator(
            sources=[(None, "192.0.2.1")], destination="127.0.0.1", rate_bps=1, flows=1, size_bytes=100
        ).prepare()


def test_background_bursts_are_followed_by_silence():
    """All sources in turn send for 100 ms in every 300 ms, so arrivals have gaps of about 200 ms."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        listener.settimeout(10)
        sources = [(None, "127.0.0.1"), (None, "127.0.0.2"), (None, "127.0.0.3")]
        actuator = BackgroundActuator(
            sources=sources, destination="127.0.0.1", rate_bps=4_000_000, flows=1, size_bytes=1000,
            burst_s=0.1, period_s=0.3,
        )  # fmt: skip
        actuator.prepare()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("faultbed.inject.node.network.background._DISCARD", listener.getsockname()[1])
            actuator.on()
        came = []
        for _ in range(120):
            _, (address, _) = listener.recvfrom(2000)
            came.append((time.monotonic(), address))
        actuator.off()
    assert {address for _, address in came} == {"127.0.0.1", "127.0.0.2", "127.0.0.3"}
    gaps = [later - sooner for (sooner, _), (later, _) in itertools.pairwise(came)]
    assert sum(gap > 0.1 for gap in gaps) >= 2, "no silence between bursts"


def test_child_ends_with_its_holder():
    """A killed holder leaves no child process."""
    code = (
        "import os,sys,time;from faultbed.inject.node.child import Child;c=Child();"
        "c.start(lambda: [time.sleep(0.01) for _ in iter(c.is_wanted, False)]);"
        "print(c._pid,flush=True);sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(HOUSE)},
    )
    child = int(holder.stdout.readline())
    assert state(child) != "Z"
    holder.kill()
    holder.communicate(timeout=10)
    until(lambda: not Path(f"/proc/{child}").exists() or state(child) == "Z")


@pytest.mark.skipif(os.geteuid() != 0, reason="real-time scheduling needs root")
def test_child_has_the_holders_scheduling_policy_and_other_processes_do_not():
    """A holder's ordinary subprocesses are not real-time; the child that forwards packets is."""
    code = (
        "import os,subprocess,sys,time;from faultbed.inject.node.child import Child;c=Child();"
        "os.sched_setscheduler(0,os.SCHED_RR|os.SCHED_RESET_ON_FORK,os.sched_param(1));"
        "c.start(lambda: [c.add() for _ in range(os.sched_getscheduler(0))]);"
        "any(c.count >= os.SCHED_RR or time.sleep(0.02) for _ in range(500));"
        "ask='import os;print(os.sched_getscheduler(0))';"
        "print(c.count, subprocess.run([sys.executable,'-c',ask],capture_output=True,text=True).stdout)"
    )
    environment = {**os.environ, "PYTHONPATH": str(HOUSE)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == [str(os.SCHED_RR), str(os.SCHED_OTHER)]


def test_memory_actuator_allocates_and_frees_memory(monkeypatch):
    """The actuator takes all available memory but the given rest; its count is the kernel's pressure stall time."""
    stalled = iter([100, 100, 350])
    monkeypatch.setattr(memory, "_stalled_us", lambda: next(stalled))
    actuator = MemoryActuator(left_mib=memory._available_mib() - 200)
    assert not actuator.prepare()["applied"]
    actuator.on()
    until(lambda: actuator.read()["taken_mib"] >= 12)
    assert actuator.read()["applied"]
    assert actuator.hits() == 250
    actuator.off()
    assert not actuator.read()["applied"]


def test_memory_actuator_refuses_if_there_is_no_memory_to_take(monkeypatch):
    monkeypatch.setattr(memory, "_stalled_us", lambda: 0)
    with pytest.raises(Refused, match="set left to less"):
        MemoryActuator(left_mib=1 << 40).prepare()


def roce(*, opcode=0x0A, qp=17, psn=5, port=4791, protocol=17):
    """An Ethernet frame with an IPv4 header of 20 bytes, UDP, and a base transport header."""
    udp = b"\xc0\x01" + port.to_bytes(2, "big") + bytes(4)
    bth = bytes([opcode, 0, 0xFF, 0xFF, 0]) + qp.to_bytes(3, "big") + b"\x80" + psn.to_bytes(3, "big")
    return bytes(12) + b"\x08\x00" + b"\x45" + bytes(8) + bytes([protocol]) + bytes(10) + udp + bth


@pytest.mark.parametrize("name", ["send_rnr_err", "out_of_buffer"])
def test_late_receives_file_appears_atomically_and_is_removed(tmp_path, monkeypatch, name):
    file, counter = tmp_path / "faultbed" / "late-receives", tmp_path / "mlx5_0" / name
    counter.parent.mkdir()
    monkeypatch.setattr(latereceives, "FILE", str(file))
    monkeypatch.setattr(latereceives, "_COUNTED", str(tmp_path / "mlx5_*"))
    one = latereceives.LateReceivesActuator(late_ms=250)
    with pytest.raises(Refused, match="choose another host"):
        one.prepare()
    counter.write_text("7\n")
    (counter.parent / "rcvd_rnr_err").write_text("1\n")
    assert one.prepare()["applied"] is False
    one.on()
    counter.write_text("47\n")
    assert (file.read_text(), one.read()["applied"], one.hits()) == ("250\n", True, 40)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    with pytest.raises(Refused, match="already exists"):
        latereceives.LateReceivesActuator(late_ms=1).prepare()
    for _ in range(2):
        subprocess.run(["sh", "-c", one.revert_script()], check=True)
    assert one.read()["applied"] is False
    one.on()
    one.off()
    one.off()
    assert not file.exists()
    counter.unlink()
    assert one.hits() is None, "an RNIC that does not count them"


def test_psn_of_returns_the_psn_of_matching_requests_only():
    """None for a response (it counts the other direction), another QP, port or protocol, or a truncated frame."""
    assert psn_of(roce(psn=0xABCDEF), 17) == 0xABCDEF
    for other in ({"opcode": 0x11}, {"opcode": 0x10}, {"qp": 18}, {"port": 53}, {"protocol": 6}):
        assert psn_of(roce(**other), 17) is None
    assert psn_of(roce()[:-2], 17) is None
    assert psn_of(bytes(12) + b"\x86\xdd" + bytes(60), 17) is None


class Passing(HopActuator):
    """A hop at which this many packets pass while a rule is created. The rule hits if its PSN passes afterwards."""

    def __init__(self, pace):
        super().__init__(netns=None, device="p", hook="egress", table="t", ruleset="drop @qp@ @psn@")
        self.now, self.pace, self.rules = 1000, pace, []

    def _command(self, text):
        self.rules.append(text)
        self.now += self.pace
        return []

    def _counter(self):
        return 0

    def _passing(self, _qp):
        self.now += 1
        return self.now & 0xFFFFFF


@pytest.mark.parametrize(("pace", "ahead", "start"), [(1, 100, 1000), (400, 100, 1000), (400, 100, 0xFFFF00)])
def test_drop_rule_is_added_again_until_its_psn_is_ahead(pace, ahead, start):
    """The PSN lies ahead however slow the rule's creation, and across the wrap of PSNs."""
    hop = Passing(pace)
    hop.now = start
    hop.bind(qp=17, psn=None, ahead=ahead)
    hop.on()
    assert 0 < (hop._psn - hop.now) & 0xFFFFFF < 1 << 23
    assert hop.rules[-1] == f"drop 17 {hop._psn}"
    assert len([rule for rule in hop.rules if rule.startswith("drop")]) == (1 if pace == 1 else 2)


def test_drop_rule_whose_psn_always_passes_is_refused():
    hop = Passing(20)
    hop.bind(qp=17, psn=None, ahead=10)

    def slower(_text):
        hop.pace = hop.pace * 17 // 10
        hop.now += hop.pace

    hop._command = slower
    with pytest.raises(Refused, match=r"use a psn beyond \+10"):
        hop.on()
