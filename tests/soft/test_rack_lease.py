"""A fault that consists of commands, as on a rack, under the lease of a real target: the same holder, without hardware.

The command creates a file on a soft host. The test checks which process removes it when holder or controller die. A
fault of a soft lab, whose holder is killed too, is beside it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from faults import case
from planned_faults import with_mechanism
from waiting import until

from faultbed.inject.fault_plan import plan
from faultbed.inject.injector import Injector
from faultbed.inject.journal import Journal
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.mechanisms.rack.rack_mechanism import Commands

pytestmark = [pytest.mark.soft, pytest.mark.needs("hosts >= 4")]

TTL_S = 10.0
FILE = "/run/faultbed-commands"
HOWS = ("clear", "end of the controller", "SIGKILL of the holder")


def made_of_commands(lab, host, index):
    """Return a planned fault of a host whose change is a file."""
    spec = FaultSpec(kind="host.cpu-steal", target=host, for_s=300.0, params={"share": 0.1})
    commands = Commands(
        needs=("touch", "rm"),
        remember={"was": (("cat", "/proc/sys/kernel/ostype"), "^(.+)$")},
        on=(("sh", "-c", f"echo {{was}} > {FILE}"),),
        off=(("rm", "-f", FILE),),
        look=("sh", "-c", f"cat {FILE} 2>/dev/null || echo none"),
        applied="^Linux$",
        normal="^none$",
    )
    planned = plan(spec, lab.topology, lab_kind=lab.kind, index=index)
    request = {**planned.request, "actuator": "commands", "args": commands.args({}), "claims": FILE}
    return with_mechanism(planned, request=request, must_move=(), must_not_move=(), shows={})


def kill_holder(lab, prepared):
    node = lab.carrier(prepared.planned.place.node)
    node.run(["systemctl", "kill", "--signal=KILL", "--kill-whom=main", prepared.lease.unit])


def test_commands_and_throttle_are_undone_whichever_process_dies(lab, tmp_path, subtests):
    """One fault for each way to end it, on a host of its own. PID 1 undoes the faults of killed holders."""
    throttle, *hosts = (host.name for host in lab.topology.hosts[: 1 + len(HOWS)])
    limit = case(lab, "throttle", for_s=300.0)
    assert limit.planned.place.node == throttle

    def is_gone(host):
        return lab.node(host).run(["test", "-e", FILE], check=False).rc != 0

    with Journal(tmp_path / "j") as journal, Injector(lab, journal, ttl_s=TTL_S) as injector:
        planned = [made_of_commands(lab, host, index) for index, host in enumerate(hosts, 1)]
        with ThreadPoolExecutor(max_workers=1 + len(hosts)) as pool:
            throttled, *faults = pool.map(injector.prepare, [limit.planned, *planned])
        for how, host, prepared in zip(HOWS, hosts, faults, strict=True):
            with subtests.test(how=how):
                assert is_gone(host), "to prepare changes nothing"
                assert prepared.arm().readback["applied"]
                assert not is_gone(host)
                if how == "end of the controller":
                    prepared.lease.release()
                elif how == "SIGKILL of the holder":
                    kill_holder(lab, prepared)
                else:
                    assert prepared.clear().cleared.ok
                print(f"{how}: undone after {until(lambda host=host: is_gone(host), within_s=TTL_S + 2):.1f} s")
        with subtests.test(kind="gpu.throttle"):
            assert throttled.arm().ok
            kill_holder(lab, throttled)
            print(f"throttle: restored after {until(lambda: limit.is_restored(lab), within_s=TTL_S + 2):.1f} s")
            receipt = throttled.clear()
            assert receipt.cleared.ok, receipt.cleared.error
            assert receipt.cleared.by == "lease"
