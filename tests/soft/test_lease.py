"""The target restores itself within its lease if controller or holder are killed or stopped, or the network is cut."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faults import KINDS, case
from waiting import until, wait_s

from faultbed.inject.evidence.reboots import boot_of
from faultbed.inject.heal import PANIC_S, heal
from faultbed.inject.injector import Injector
from faultbed.inject.journal import Journal
from faultbed.inject.leases.channels import local_python
from faultbed.inject.node import qmp
from faultbed.testbed.backends.soft.fleet import BOOT_DEADLINE_S
from faultbed.testbed.errors import LabError
from faultbed.testbed.observe import fingerprint

pytestmark = pytest.mark.soft

TTL_S = 10.0

_CONTROLLER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from faults import case
from faultbed.inject.injector import Injector
from faultbed.inject.journal import Journal
from faultbed.testbed.lab import open_lab
with open_lab(Path(sys.argv[1])) as lab, Journal(Path(sys.argv[4])) as journal:
    with Injector(lab, journal, ttl_s=float(sys.argv[5])) as injector:
        assert injector.prepare(case(lab, sys.argv[2], for_s=300.0).planned).arm().ok
        print("armed", flush=True)
        time.sleep(300)
"""


@pytest.fixture
def controllers(lab, tmp_path):
    """Start a controller for each kind of fault, in a process of its own. Each one holds its fault for minutes."""
    with contextlib.ExitStack() as stack:
        started = {}
        for name in KINDS:
            argv = [
                sys.executable, "-c", _CONTROLLER, str(lab.inventory), name, str(Path(__file__).parent),
                str(tmp_path / f"{name}.jsonl"), str(TTL_S),
            ]  # fmt: skip
            started[name] = stack.enter_context(subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True))
            stack.callback(started[name].kill)
        yield started


def test_killed_controllers_leave_nothing(lab, controllers, subtests):
    """SIGKILL during the faults, of one controller for each: restored within TTL + 2 s.

    The fixture checks that the lab looks as before.
    """
    faults = {name: case(lab, name, for_s=300.0) for name in KINDS}
    for name, controller in controllers.items():
        with subtests.test(kind=name):
            assert controller.stdout.readline() == b"armed\n"
    for name, fault in faults.items():
        with subtests.test(kind=name):
            assert not fault.is_restored(lab)
    killed_s = {}
    for name, controller in controllers.items():
        os.kill(controller.pid, signal.SIGKILL)
        killed_s[name] = time.monotonic()

    def restored_s(name):
        """Return how long after its controller's end the target was restored; each kind has its own deadline."""
        until(lambda: faults[name].is_restored(lab), within_s=TTL_S + 2 - (time.monotonic() - killed_s[name]))
        return time.monotonic() - killed_s[name]

    with ThreadPoolExecutor(max_workers=len(faults)) as pool:
        waits = {name: pool.submit(restored_s, name) for name in faults}
    for name, wait in waits.items():
        with subtests.test(kind=name):
            print(f"{name}: restored {wait.result():.1f} s after SIGKILL")


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("how", ["KILL", "STOP"])
def test_stopped_or_killed_holder_is_reverted_by_the_target(lab, tmp_path, name, how):
    """SIGKILL and SIGSTOP of the holder: PID 1, the kernel or the guardian restores, and the receipt names which.

    A throttle and SIGKILL are in every `make test`, beside faults of commands: `test_rack_lease.py`.
    """
    fault = case(lab, name, for_s=300.0)
    planned = fault.planned
    with Journal(tmp_path / "j") as journal, Injector(lab, journal, ttl_s=TTL_S) as injector:
        prepared = injector.prepare(planned)
        assert prepared.arm().ok
        if planned.place.local:
            guardian = prepared.lease.guardian_pid
            children = Path(f"/proc/{guardian}/task/{guardian}/children").read_text().split()
            os.kill(int(children[0]), getattr(signal, f"SIG{how}"))
        else:
            node = lab.carrier(planned.place.node)
            node.run(["systemctl", "kill", f"--signal={how}", "--kill-whom=main", prepared.lease.unit])
        print(f"{name}: restored {until(lambda: fault.is_restored(lab), within_s=TTL_S + 2):.1f} s after SIG{how}")
        receipt = prepared.clear()
    assert receipt.cleared.ok, receipt.cleared.error
    assert receipt.cleared.by == "lease"


def test_reverted_holder_stays_idle_until_its_injector_ends(lab, tmp_path):
    """The fault is reverted at once, and the unit ends later, because stopping it costs an emulated host seconds."""
    fault = case(lab, "throttle", for_s=300.0)
    node = lab.carrier(fault.planned.place.node)

    def stands(unit):
        return node.run(["systemctl", "is-active", "--quiet", unit], check=False).rc == 0

    with Journal(tmp_path / "j") as journal, Injector(lab, journal, ttl_s=TTL_S / 2) as injector:
        prepared = injector.prepare(fault.planned)
        assert prepared.arm().ok
        receipt = prepared.clear(keep_holder=True)
        assert receipt.cleared.ok, receipt.cleared.error
        assert fault.is_restored(lab)
        assert injector.active() == ()
        wait_s(TTL_S / 2 + 2)
        assert stands(prepared.lease.unit), "its lease ran out"
    until(lambda: not stands(prepared.lease.unit))


WITNESS = "/run/witness-of-lease"
NETS_UP_S = 90.0


def looking(fault):
    """Return shell code for the target: wait until the fault is gone, and store the uptime of that moment."""
    planned = fault.planned
    if fault.name == "drop":
        args = planned.request["args"]
        gone = f"! ip netns exec {args['netns']} nft list tables netdev | grep -q {args['table']}"
    else:
        group = f"/sys/fs/cgroup/faultbed.slice/faultbed-{planned.target.text.partition(':')[2]}.service/cpu.max"
        gone = f"grep -q ^max {group}"
    return f"until {gone}; do sleep 0.1; done; cat /proc/uptime >{WITNESS}"


@contextlib.contextmanager
def without_management(lab, machine):
    """Cut a machine's management link. A separate process restores it if this one dies."""
    socket, nic = str(lab.qmp_socket(machine)), lab.nic_id(machine, "mgmt0")
    late = shlex.join([*local_python(), "-m", "faultbed.inject.node.qmp", socket, nic])
    timer = subprocess.Popen(["sh", "-c", f"sleep {2 * TTL_S + 30:g}; {late}"], start_new_session=True)
    try:
        qmp.set_link(socket, nic, up=False)
        yield
    finally:
        qmp.set_link(socket, nic, up=True)
        os.killpg(timer.pid, signal.SIGKILL)
        timer.wait()


def answers(lab, machine, *argv):
    """Return a command's output on a machine; None: it does not answer, or prints nothing."""
    try:
        return lab.node(machine).run(list(argv), check=False, timeout_s=10).stdout or None
    except LabError:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["throttle", "drop"])
def test_unreachable_target_restores_itself(lab, tmp_path, name):
    """The management network is cut, both ends live: restored within TTL + 2 s, by the target's own clock."""
    fault = case(lab, name, for_s=300.0)
    machine = lab.carrier(fault.planned.place.node).name
    with Journal(tmp_path / "j") as journal, Injector(lab, journal, ttl_s=TTL_S) as injector:
        prepared = injector.prepare(fault.planned)
        assert prepared.arm().ok
        lab.node(machine).run(["systemd-run", "-q", "--unit=witness-of-lease", "sh", "-c", looking(fault)])
        cut_s = float(lab.node(machine).run(["cat", "/proc/uptime"]).stdout.split()[0])
        with without_management(lab, machine):
            threading.Event().wait(TTL_S + 3)
        until(lambda: answers(lab, machine, "cat", WITNESS), within_s=NETS_UP_S)
        took_s = float(answers(lab, machine, "cat", WITNESS).split()[0]) - cut_s
        lab.node(machine).run(["rm", WITNESS])
        print(f"{name}: restored {took_s:.1f} s after the cut")
        receipt = prepared.clear()
    assert TTL_S / 2 < took_s <= TTL_S + 2
    assert receipt.cleared.ok, receipt.cleared.error
    assert receipt.cleared.by == "lease"


@pytest.mark.slow
def test_host_rebooting_under_a_fault_is_never_clean(lab, tmp_path):
    """An external reset removes the fault and everything that provisioning made. The lab is DIRTY until heal repairs
    it.
    """
    fault = case(lab, "throttle", for_s=300.0)
    host = fault.planned.place.node
    before = fingerprint.capture(lab)
    was = boot_of(lab.node(host)).id

    def is_back():
        with contextlib.suppress(LabError):
            return boot_of(lab.node(host), timeout_s=10).id != was
        lab.forget(host)
        return False

    with Journal(tmp_path / "j") as journal, Injector(lab, journal, ttl_s=TTL_S) as injector:
        prepared = injector.prepare(fault.planned)
        assert prepared.arm().ok
        qmp.execute(str(lab.qmp_socket(host)), "system_reset", event="RESET")
        lab.forget(host)
        until(is_back, within_s=BOOT_DEADLINE_S[lab.accelerator])
        receipt = prepared.clear()
    assert not receipt.proved
    left = fingerprint.diff(before, fingerprint.capture(lab))
    assert [line for line in left if line.startswith(f"{host}: rdma ")], left
    assert f"{host}: provisioned again after a reboot" in heal(lab)
    assert fingerprint.settle(lab, before) == []
    assert heal(lab) == []


@pytest.mark.slow
def test_panic_restores_a_lab_with_three_faults_at_once(lab, tmp_path):
    """One call of `heal --panic` removes a flapping uplink, an RNIC without carrier and a GPU throttle.

    The time is printed, and compared with `PANIC_S` if guests are not emulated.
    """
    faults = [case(lab, name, for_s=300.0) for name in ("uplink", "rnic", "throttle")]
    with Journal(tmp_path / "j") as journal, Injector(lab, journal, ttl_s=TTL_S) as injector:
        for fault in faults:
            assert injector.prepare(fault.planned).arm().ok
        assert not any(fault.is_restored(lab) for fault in faults)
        begin = time.monotonic()
        done = heal(lab, panic=True)
        took_s = time.monotonic() - begin
        left = [fault.name for fault in faults if not fault.is_restored(lab)]
        print(f"heal --panic: {took_s:.1f} s", *done, sep="\n  ")
    assert left == []
    assert lab.accelerator != "kvm" or took_s <= PANIC_S
