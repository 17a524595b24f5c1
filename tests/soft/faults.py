"""Shared parts of the fault tests: a fault of each kind, its workload, and a cheap check of its target."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from faultbed.inject.fault_plan import plan
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.mechanisms.planned_fault import PlannedFault
from faultbed.testbed.lab import Lab
from faultbed.testbed.observe import counters
from faultbed.traffic.engine.running_traffic import Running
from faultbed.traffic.engine.task_specs import QpParams
from faultbed.traffic.flows import flow_run
from faultbed.traffic.flows.flow_run import FlowSpec
from faultbed.traffic.workloads import job
from faultbed.traffic.workloads.job import JobPhase, JobResult, JobSpec
from faultbed.traffic.workloads.storage_service import Storage

KINDS = ("uplink", "rnic", "drop", "throttle")

_GPU_WORK = """
import json, select, socket, sys
s = socket.socket(socket.AF_UNIX); s.connect("/run/faultbed/gpu0.sock"); f = s.makefile("rb")
print(json.dumps({"event": "working"}), flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:  # until its channel is closed: a GPU serves one at a time
    s.sendall(b'{"units": 20}\\n'); f.readline()
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A planned fault, and a cheap command that shows whether its target is restored."""

    name: str
    planned: PlannedFault

    def is_restored(self, lab: Lab) -> bool:
        """Return whether the fault has left nothing on its target."""
        if self.name == "drop":
            args = self.planned.request["args"]
            listed = lab.node(args["netns"]).run(["nft", "list", "tables", "netdev"], check=False)
            return listed.rc == 0 and args["table"] not in listed.stdout
        current = counters.read(lab, [key.split("/")[0] for key, _ in self.planned.mechanism.restored])
        return all(
            current[key.split("/")[0]].get(key.split("/")[1]) == value for key, value in self.planned.mechanism.restored
        )


def case(lab: Lab, name: str, *, for_s: float = 3.0) -> Case:
    """Return a fault of this kind on the first suitable target of the lab."""
    uplink, hosts = lab.topology.uplinks[0], lab.topology.hosts
    spec = {
        "uplink": FaultSpec(kind="link.flap", target=uplink.name, for_s=for_s),
        "rnic": FaultSpec(kind="link.flap", target=f"{hosts[0].name}:{hosts[0].rnics[1].name}", for_s=for_s),
        "drop": FaultSpec(
            kind="packet.drop", target=f"{hosts[1].name}:{hosts[1].rnics[0].name}", for_s=for_s, params={"share": 0.2}
        ),
        "throttle": FaultSpec(kind="gpu.throttle", target=f"{hosts[0].name}:gpu0", for_s=for_s, params={"percent": 50}),
        # Not in KINDS: this fault ends when its host is back, which takes longer than any lease.
        "reboot": FaultSpec(kind="host.reboot", target=hosts[-1].name, for_s=for_s),
    }[name]
    return Case(name=name, planned=plan(spec, lab.topology, lab_kind="soft"))


@contextlib.contextmanager
def work(lab: Lab, name: str) -> Iterator[None]:
    """Run the workload that a fault of this kind needs."""
    hosts = lab.topology.hosts
    if name == "drop":
        spec = FlowSpec(
            src=f"{hosts[0].name}:{hosts[0].rnics[0].name}",
            dst=f"{hosts[1].name}:{hosts[1].rnics[0].name}",
            message_bytes=16384,
            depth=2,
            duration_s=300.0,
        )
        running = flow_run.start(lab, spec)
        try:
            yield
        finally:
            running.stop()
            running.wait(timeout_s=60)
    elif name == "throttle":
        channel = lab.node(hosts[0].name).open(["python3", "-c", _GPU_WORK])
        try:
            assert channel.receive(timeout_s=30) == {"event": "working"}
            yield
        finally:
            channel.close()
    else:
        yield


@contextlib.contextmanager
def stored_job(lab: Lab) -> Iterator[Running[JobResult]]:
    """Run a job of four hosts with storage on the last one, which tolerates a standstill of 90 s."""
    spec = JobSpec(
        grid=(("dp", 4),),
        phases=(JobPhase(along="dp", collective="all-reduce", size_bytes=1 << 16),),
        iterations=10_000,
        warmup=1,
        op_deadline_s=90.0,
        peer_deadline_s=90.0,
        stall_deadline_s=120.0,
        storage=Storage(
            host=lab.topology.hosts[3].name, ingest_bytes=1 << 16, checkpoint_bytes=1 << 19, every=5, mode="async"
        ),
        qp=QpParams(timeout=18),
    )
    with job.start(lab, spec) as running:
        yield running
        running.abort("the test is over")
