"""A fault that consists of commands, as on a rack, under the lease of a real target: the same holder, without hardware.

The command creates a file on a soft host. The tests check which process removes it when holder or controller die.
"""

from __future__ import annotations

import dataclasses

import pytest
from waiting import until

from inject.fault_plan import FaultSpec, plan
from inject.injector import Injector
from inject.journal import Journal
from inject.mechanisms.rack.rack_mechanism import Commands

pytestmark = pytest.mark.soft

TTL_S = 10.0
FILE = "/run/faultbed-commands"


def made_of_commands(lab):
    """Return a planned fault of the first host whose change is a file."""
    host = lab.topology.hosts[0].name
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
    planned = plan(spec, lab.topology, lab_kind=lab.kind)
    request = {**planned.request, "actuator": "commands", "args": commands.args({}), "claims": FILE}
    return dataclasses.replace(planned, request=request, must_move=(), must_not_move=(), shows={})


@pytest.mark.parametrize("how", ["clear", "end of the controller", "SIGKILL of the holder"])
def test_rack_commands_are_undone_whichever_process_dies(lab, tmp_path, how):
    planned = made_of_commands(lab)
    node = lab.node(planned.place.node)

    def is_gone():
        return node.run(["test", "-e", FILE], check=False).rc != 0

    with Journal(tmp_path / "j") as journal, Injector(lab, journal, ttl_s=TTL_S) as injector:
        prepared = injector.prepare(planned)
        assert is_gone(), "to prepare changes nothing"
        assert prepared.arm().readback["applied"]
        assert not is_gone()
        if how == "end of the controller":
            prepared.lease.release()
        elif how == "SIGKILL of the holder":
            node.run(["systemctl", "kill", "--signal=KILL", "--kill-whom=main", prepared.lease.unit])
        else:
            assert prepared.clear().cleared.ok
        print(f"{how}: undone after {until(is_gone, within_s=TTL_S + 2):.1f} s")
