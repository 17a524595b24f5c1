"""Plan `gpu.throttle`, `gpu.power-cap` and `gpu.noisy-neighbour` for this machine's GPU, and change nothing.

    python tests/lab/gpu_day/plans.py OUT

Of each plan the holder's checks before arming are carried out, all of which only read: the programs exist, the values
to restore can be stored, and the readback says that nothing is changed yet, on an idle and on a busy GPU. The program
refuses to run a command with an option that sets something.
"""

from __future__ import annotations

import dataclasses
import re

import day
import gpu_rank

from faultbed.inject.fault_plan import plan
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.node.actuator import Refused, make
from faultbed.testbed.model.topology import Gpu, Host, Topology

KINDS = {"gpu.throttle": {"percent": 5}, "gpu.power-cap": {"percent": 30}, "gpu.noisy-neighbour": {"neighbours": 2}}
QUERY = re.compile(r"nvidia-smi -i [0-9a-f:.]+ --query-gpu=[a-z_.,]+ --format=csv,noheader,nounits")
"""The only form in which a plan's checks may call nvidia-smi."""


def topology(pcie):
    """Return a rack of one host with this machine's GPU; reading an inventory would need Ansible."""
    host = Host(
        name="host1",
        zone="zone1",
        rack="rack1",
        rnics=(),
        gpus=(Gpu(name="gpu0", kind="h100-sxm", pcie=pcie),),
        front_end_netdev="eth0",
        front_end_mac="02:fb:05:00:00:01",
        front_end_address="192.0.2.11/24",
    )
    return Topology(hosts=(host,), switches=(), links=())


def read_only(request):
    """Return the commands that `prepare` runs; raise if one of them could set something."""
    args = request["args"]
    commands = [
        args["look"],
        *(words for words, *_ in args["able"]),
        *(words for words, _ in args["remember"].values()),
    ]
    for words in commands:
        text = " ".join(words)
        if words[0] not in ("sh", "nvidia-smi") or text.count("nvidia-smi") != len(QUERY.findall(text)):
            raise SystemExit(f"{words}: this could change the GPU; nothing was run")
    return commands


def prepared(request):
    """Return what the holder reads before it would arm the fault, and the values that it would restore."""
    actuator = make(request["actuator"], request["args"])
    try:
        reading = actuator.prepare()
    except Refused as refusal:
        return {"refused": str(refusal)}
    return {"reading": reading, "restores": getattr(actuator, "_known", {}), "revert": actuator.revert_script()}


def main():
    pcie = gpu_rank.first_pcie()
    rack = topology(pcie)
    rank = gpu_rank.Rank(pcie)
    plans, checks = {}, []
    before = day.smi("--query-gpu=clocks.sm,power.limit,persistence_mode,compute_mode", "--format=csv,noheader")
    try:
        rank.took_s(1)
        for kind, params in KINDS.items():
            planned = plan(FaultSpec(kind=kind, target="host1:gpu0", for_s=5.0, params=params), rack, lab_kind="rack")
            reads = read_only(planned.request) if planned.request["actuator"] == "commands" else []
            idle = prepared(planned.request)
            rank.took_s(gpu_rank.WARM)
            rank.start(1500)  # 3 s
            busy = prepared(planned.request)
            rank.finish()
            steps = [dataclasses.asdict(step) for step in planned.mechanism.steps]
            plans[kind] = {"steps": steps, "reads": reads, "idle": idle, "busy": busy}
            for state, result in (("idle", idle), ("busy", busy)):
                said = result.get("refused") or result["reading"]
                checks.append((f"{kind}, {state} GPU: {said}", "refused" not in result))
                if "reading" in result:
                    checks.append((f"{kind}, {state} GPU: not applied", result["reading"]["applied"] is False))
    finally:
        rank.close()
    after = day.smi("--query-gpu=clocks.sm,power.limit,persistence_mode,compute_mode", "--format=csv,noheader")
    settings = [text.partition(", ")[2] for text in (before, after)]
    checks.append((f"settings before and after: {settings[0].strip()}", settings[0] == settings[1]))
    day.save("plans.json", plans=plans, before=before, after=after)
    day.conclude(checks)


if __name__ == "__main__":
    main()
