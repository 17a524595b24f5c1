"""SIGKILL of the controller in every phase of every kind: nothing is left, and the lab looks as before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from faults import stored_job
from waiting import until

from faultbed.inject.fault_plan import plan
from faultbed.inject.kinds.catalogue import CATALOGUE
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.leases.channels import revert_dir

pytestmark = [pytest.mark.soft, pytest.mark.slow, pytest.mark.needs("hosts >= 4", "uplinks >= 2")]

TTL_S = 10.0
PHASES = ("arming", "active", "clearing")

KINDS = {
    "link.down": ("host1:rxe1", {}),
    "link.flap": ("rtsw1:ctsw1", {"period": "1s"}),
    "link.oneway": ("host1:rxe0", {}),
    "link.rate": ("host1:rxe0", {"rate": "5Mb/s"}),
    "link.mtu": ("host1:rxe0", {}),
    "packet.drop": ("host1:rxe0", {"share": 0.1}),
    "packet.mark": ("host1:rxe0", {}),
    "packet.corrupt": ("host1:rxe0", {"share": 0.1}),
    "packet.delay": ("host1:rxe0", {"delay": "20ms"}),
    "packet.reorder": ("host1:rxe0", {"share": 0.1, "direction": "from"}),
    "packet.duplicate": ("host1:rxe0", {}),
    "data.corrupt": ("host1:rxe0", {"every": 50}),
    "packet.forge": ("host1:rxe0", {"what": "stray"}),
    "congestion.shallow-queue": ("host1:rxe0", {}),
    "congestion.background": ("host1:rxe0", {}),
    "congestion.incast": ("host1:rxe0", {}),
    "congestion.hash-collision": ("rtsw1:ctsw1", {}),
    "congestion.late-receives": ("host1", {}),
    "switch.reboot": ("ctsw1", {}),
    "switch.drain": ("ctsw1", {}),
    "rnic.reset": ("host4:rxe1", {}),
    "rnic.remove": ("host4:rxe1", {}),
    "rnic.address": ("host4:rxe1", {}),
    "gpu.lost": ("host2:gpu0", {}),
    "gpu.xid": ("host2:gpu0", {}),
    "gpu.ecc": ("host2:gpu0", {"error": "uncontained"}),
    "gpu.row-remap": ("host2:gpu0", {}),
    "gpu.overheat": ("host2:gpu0", {"celsius": 92}),
    "switch.bgp-kill": ("ctsw1", {}),
    "switch.bgp-reset": ("ctsw1", {}),
    "switch.freeze": ("ctsw1", {}),
    "switch.withdraw": ("rtsw2", {}),
    "switch.hash-policy": ("rtsw1", {}),
    "host.freeze": ("host4", {}),
    "host.reboot": ("host4", {}),
    "host.memory-pressure": ("host4", {}),
    "host.clock-step": ("host4", {"step": "-30s"}),
    "host.disk-full": ("host4", {}),
    "host.cpu-steal": ("host4", {"share": 0.5}),
    "gpu.throttle": ("host2:gpu0", {"percent": 50}),
    "gpu.thermal": ("host2:gpu0", {}),
    "gpu.noisy-neighbour": ("host2:gpu0", {}),
}
"""Everything that ends by itself and needs no job."""

OF_A_JOB = {
    "host.rank-hang": ("host3", {}),
    "congestion.slow-receiver": ("host3", {}),
    "storage.slow": ("host4", {"percent": 5}),
    "storage.stall": ("host4", {}),
    "storage.burst": ("host4", {}),
}
"""What is done to a job, or to its storage: the job must carry on as before."""

ITERATIONS_AFTERWARDS = 3
CARRIES_ON_WITHIN_S = 60.0

_CONTROLLER = """
import json, sys, time
from pathlib import Path
from faultbed.inject.injector import Injector
from faultbed.inject.journal import Journal
from faultbed.inject.fault_plan import plan
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.testbed.lab import open_lab
inventory, kind, target, params, phase, journal, ttl_s = sys.argv[1:]
with open_lab(Path(inventory)) as lab, Journal(Path(journal)) as written:
    spec = FaultSpec(kind=kind, target=target, for_s=300.0, params=json.loads(params))
    with Injector(lab, written, ttl_s=float(ttl_s)) as injector:
        prepared = injector.prepare(plan(spec, lab.topology, lab_kind="soft"))
        if phase == "arming":
            print(phase, flush=True)
        assert prepared.arm().ok
        if phase != "arming":
            print(phase, flush=True)
        if phase == "clearing":
            prepared.clear()
        time.sleep(300)
"""


def test_matrix_has_every_kind():
    """A new kind must be added here, unless nothing can revert it."""
    on_soft = {name for name, kind in CATALOGUE.items() if "soft" in kind.fidelity}
    assert KINDS.keys() | OF_A_JOB.keys() | {"host.rank-kill"} == on_soft


def is_gone(lab, planned):
    """Return whether no stored revert and no holder is left, beside QEMU or on the target."""
    if planned.place.local:
        return not list(revert_dir(lab).glob("*.revert"))
    script = (
        '[ -z "$(ls /run/faultbed/faults/*.revert 2>/dev/null)" ] && '
        "[ -z \"$(systemctl list-units --plain --no-legend 'faultbed-fault-*')\" ]"
    )
    return lab.carrier(planned.place.node).run(["sh", "-c", script], check=False).rc == 0


def killed_and_restored(lab, tmp_path, kind, phase):
    """Start a controller with the fault, kill it in this phase, and wait until the fault is gone."""
    target, params = (KINDS | OF_A_JOB)[kind]
    planned = plan(FaultSpec(kind=kind, target=target, for_s=300.0, params=params), lab.topology, lab_kind="soft")
    controller = subprocess.Popen(
        [
            sys.executable, "-c", _CONTROLLER, str(lab.inventory), kind, target, json.dumps(params), phase,
            str(tmp_path / "journal.jsonl"), str(TTL_S),
        ],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    with controller:
        assert controller.stdout.readline() == f"{phase}\n".encode()
        os.kill(controller.pid, signal.SIGKILL)
        patience_s = planned.request.get("patience_s", 0.0)
        took_s = until(lambda: is_gone(lab, planned), within_s=TTL_S + 2 + patience_s)
    if patience_s:
        lab.forget(planned.place.node)  # the connection from before its reboot
    print(f"{kind} while {phase}: nothing left {took_s:.1f} s after SIGKILL")


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_controller_leaves_nothing_of_any_kind(lab, tmp_path, kind, phase):
    """Restored within TTL + 2 s in every phase; the fixture checks that the lab looks as before.
    A kind without a revert ends when its host has booted again.
    """
    killed_and_restored(lab, tmp_path, kind, phase)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", OF_A_JOB)
def test_killed_controller_leaves_a_running_job_intact(lab, tmp_path, kind, phase):
    """A killed controller's fault ends under a job, which continues or resumes its iterations."""
    with stored_job(lab) as running:
        until(lambda: iterations(running) > 0)
        killed_and_restored(lab, tmp_path, kind, phase)
        before = iterations(running)
        until(lambda: iterations(running) >= before + 4 * ITERATIONS_AFTERWARDS, within_s=CARRIES_ON_WITHIN_S)
        assert not running.is_over, running.failure


def iterations(running):
    """Return the number of iterations that all four ranks together have reported."""
    return sum(event.name == "iteration" for event in running.events)
