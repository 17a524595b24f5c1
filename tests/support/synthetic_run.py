"""A synthetic run for tests of judge and report, with plausible values that were not measured. Never shipped."""

from __future__ import annotations

import dataclasses
import functools
import random
from dataclasses import dataclass

import msgspec

from faultbed.harness.ledger.sealed import Checked
from faultbed.harness.record.evidence.emulation_evidence import EmulationEvidence
from faultbed.harness.record.evidence.fault_evidence import FaultRun, FaultsEvidence
from faultbed.harness.record.evidence.lab_evidence import LabEvidence
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.record.evidence.telemetry_evidence import TelemetryEvidence
from faultbed.harness.record.evidence.workload_evidence import (
    Connection,
    Iteration,
    Rank,
    RankSeries,
    Sample,
    Summary,
    WorkloadEvidence,
)
from faultbed.inject.evidence.receipt import Armed, Cleared, Fired, Receipt, concluded
from faultbed.inject.evidence.workload_use import Exposure, WorkloadUse
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.testbed.model.topology import Gpu, Host, Link, Port, Rnic, Switch, Topology
from faultbed.traffic.engine.run_results import QpError

S = 1_000_000_000
MS = 1_000_000
T0 = 7_000 * S
RANK_BYTES = 3 * (1 << 19)


def lost_at(time_ns):
    """Return a queue pair that failed at a time."""
    status = "RETRY_EXC_ERR"
    ends = {"endpoint": "host1:rxe0", "peer": "host3:rxe0"}
    return QpError(time_ns=time_ns, connection=0, qpn=17, status=status, generation=0, **ends)


def soft_topology() -> Topology:
    """Return a topology of two racks, each with two hosts of two RNICs; two RTSWs and two CTSWs."""
    hosts, links, switches = [], [], []
    switches.extend(_switch(f"ctsw{spine}", "ctsw", None, 2 + spine) for spine in (1, 2))
    for rack in (1, 2):
        rtsw = f"rtsw{rack}"
        switches.append(_switch(rtsw, "rtsw", f"rack{rack}", rack))
        for slot in (0, 1):
            host = f"host{2 * rack - 1 + slot}"
            rnics = []
            for nic in (0, 1):
                number = 2 * (2 * slot + nic)
                address = f"10.77.{rack}.{number + 1}/31"
                mac = f"02:fb:{rack:02x}:{slot:02x}:{nic:02x}:01"
                rnics.append(Rnic(name=f"rxe{nic}", netdev=f"be{nic}", mac=mac, address=address))
                a = Port(
                    node=rtsw,
                    netdev=f"{host}-rxe{nic}",
                    mac=f"02:fb:{rack:02x}:{slot:02x}:{nic:02x}:02",
                    address=f"10.77.{rack}.{number}/31",
                )
                b = Port(node=host, netdev=f"be{nic}", mac=mac, address=address)
                links.append(Link(a=a, b=b, rnic=f"rxe{nic}"))
            hosts.append(
                Host(
                    name=host,
                    zone="zone1",
                    rack=f"rack{rack}",
                    rnics=tuple(rnics),
                    gpus=(Gpu(name="gpu0", kind="soft"),),
                    front_end_netdev="fe0",
                    front_end_mac=f"02:fb:fe:00:00:0{2 * rack - 1 + slot}",
                    front_end_address=f"10.79.0.{2 * rack - 1 + slot}/24",
                )
            )
        for spine in (1, 2):
            a = Port(node=rtsw, netdev=f"ctsw{spine}", mac=f"02:fb:0a:0{rack}:0{spine}:01", address=None)
            b = Port(node=f"ctsw{spine}", netdev=rtsw, mac=f"02:fb:0a:0{rack}:0{spine}:02", address=None)
            links.append(Link(a=a, b=b, rnic=None))
    return Topology(hosts=tuple(hosts), switches=tuple(switches), links=tuple(links))


def _switch(name: str, role: str, rack: str | None, number: int) -> Switch:
    return Switch(
        name=name,
        role=role,  # type: ignore[arg-type]
        zone="zone1",
        rack=rack,
        asn=65100 + number,
        loopback=f"10.78.0.{number}/32",
        carrier="fabric",
    )


_FAMILIES = {
    "lab": LabEvidence, "workload": WorkloadEvidence, "injected": FaultsEvidence, "telemetry": TelemetryEvidence,
    "emulation": EmulationEvidence,
}  # fmt: skip
_PLACES = {field: (family, field) for family, kind in _FAMILIES.items() for field in kind.__struct_fields__} | {
    "lab": ("lab", "name"), "lab_kind": ("lab", "kind"), "lab_state": ("lab", "state"), "lab_diff": ("lab", "diff"),
    "workload": ("workload", "planned"),
}  # fmt: skip
"""Where a value of a run is, by the keyword of `run_of` and `changed`."""


def run_of(*, twin=None, routing=None, **fields) -> RunEvidence:
    """Return a run with these values, each in the evidence that it belongs to. `twin` are the series of its twin."""
    of_families = {family: {} for family in _FAMILIES}
    for name, value in fields.items():
        family, field = _PLACES[name]
        of_families[family][field] = value
    made = {family: kind(**of_families[family]) for family, kind in _FAMILIES.items()}
    return changed(RunEvidence(**made, routing=routing), twin=twin)


def changed(record, **fields):
    """Return a record with other values: those of a run each in the evidence that it belongs to."""
    if not isinstance(record, RunEvidence):
        return msgspec.structs.replace(record, **fields)
    families = {}
    families |= {name: fields.pop(name) for name in ("routing", "emulation") if name in fields}
    of_twin = {name: fields.pop(name) for name in ("twin", "twin_load", "twin_failure") if name in fields}
    for name, value in fields.items():
        family, field = _PLACES[name]
        families.setdefault(family, {})[field] = value
    made = {
        family: msgspec.structs.replace(getattr(record, family) or _FAMILIES[family](), **values)
        if isinstance(values, dict)
        else values
        for family, values in families.items()
    }
    run = dataclasses.replace(record, **made)
    return dataclasses.replace(run, twin=_twin(run, **of_twin)) if of_twin else run


def reread(run):
    """Return a run as it is read again from its files."""
    read = {
        field.name: msgspec.json.decode(msgspec.json.encode(value), type=type(value))
        for field in dataclasses.fields(run)
        if (value := getattr(run, field.name)) is not None
    }
    for evidence in read.values():
        if isinstance(evidence, Checked):
            evidence.refuse_contradictions()
    return RunEvidence(**read)


def _twin(run, **of_twin):
    """Return a twin with the same times and ranks as the run. Its failure is one with wrong data."""
    old, failure = run.twin, of_twin.get("twin_failure")
    series = of_twin.get("twin", old.series if old else None)
    if series is None and failure is None and "twin_load" not in of_twin:
        return None
    base = old or WorkloadEvidence(
        planned=run.workload.planned, t0_ns=run.workload.t0_ns, end_ns=run.workload.end_ns,
        sample_ns=run.workload.sample_ns,
    )  # fmt: skip
    ranks = tuple(Rank(rank=one.rank, host="", rnic="") for one in series or ())
    return msgspec.structs.replace(
        base, ranks=ranks, series=series or (), load=of_twin.get("twin_load", base.load), failure=failure,
        wrong_elements=1 if failure else 0,
    )  # fmt: skip


@dataclass
class Window:
    start: float
    end: float


PATHS = (
    ("host1", "rtsw1", "host2"),
    ("host2", "rtsw1", "ctsw1", "rtsw2", "host3"),
    ("host3", "rtsw2", "host4"),
    ("host4", "rtsw2", "ctsw2", "rtsw1", "host1"),
)
USE = WorkloadUse(
    at_ns=T0,
    rnics=tuple(f"host{number}:rxe0" for number in (1, 2, 3, 4)),
    gpus=tuple(f"host{number}:gpu0" for number in (1, 2, 3, 4)),
    paths=PATHS,
)
"""What the workload of the run uses all the time."""

FLAP, LOSS, THROTTLE = Window(9.412, 10.5), Window(19.377, 22.4), Window(32.871, 38.9)


def synthetic_run(*, seconds: float = 52.0, fired: bool = True, lab_state: str = "CLEAN") -> RunEvidence:
    """Return a ring all-reduce over four hosts with three faults: a flap, loss and a throttled GPU."""
    series = _ring(11, seconds, faults=True)
    twin = _ring(12, seconds, faults=False)
    hosts = [f"host{n}" for n in (1, 2, 3, 4)]
    before = {host: _counters(0, 0, 0) for host in hosts}
    after = {host: _counters(3 if host == "host1" else 0, 0, 1) for host in hosts}
    after["host3"] = _counters(0, 61, 2)
    after["host2"] = _counters(66, 0, 61)
    return run_of(
        lab="soft",
        lab_kind="soft",
        accelerator="tcg",
        topology=soft_topology(),
        t0_ns=T0,
        end_ns=T0 + int(seconds * S),
        clock_error_ns=int(1.8 * MS),
        workload={
            "collective": "all-reduce",
            "algorithm": "ring",
            "size_bytes": 1 << 20,
            "ranks": [f"{host}:rxe0" for host in hosts],
            "iterations": None,
            "duration_ns": int(seconds * S),
            "compute_units": 8,
        },
        ranks=tuple(Rank(rank=i, host=host, rnic="rxe0") for i, host in enumerate(hosts)),
        series=series,
        connections=tuple(
            Connection(
                src=f"{hosts[i]}:rxe0",
                dst=f"{hosts[(i + 1) % 4]}:rxe0",
                lqpn=17 + i,
                rqpn=17 + (i + 1) % 4,
                udp_sport=53377 + 91 * i,
                path=path,
            )
            for i, path in enumerate(PATHS)
        ),
        faults=_faults(fired=fired),
        counters_before=before,
        counters_after=after,
        twin=twin,
        summary=Summary(algbw_gbps=0.0148, busbw_gbps=0.0222),
        lab_state=lab_state,  # type: ignore[arg-type]
        lab_diff=() if lab_state == "CLEAN" else ('fabric: qdisc netem on rtsw2 "host3-rxe0" was not there before',),
    )


def _counters(retry: int, gaps: int, naks: int) -> dict[str, int]:
    return {
        "rxe0.completer_retry_err": retry,
        "rxe0.out_of_seq_request": gaps,
        "rxe0.rcvd_seq_err": naks,
        "rxe0.send_err": 0,
        "rxe0.duplicate_request": retry // 2,
        "be0.rx_packets": 10_000 + 3 * retry,
    }


@functools.cache
def _ring(seed: int, seconds: float, *, faults: bool) -> tuple[RankSeries, ...]:
    draw = random.Random(seed)
    steps: list[list[Iteration]] = [[], [], [], []]
    bins: list[dict[int, float]] = [{}, {}, {}, {}]
    now, index = 0.15, 0
    while now < seconds - 1.2:
        compute = [0.17 + draw.random() * 0.02 for _ in range(4)]
        comm = 0.24 + draw.random() * 0.03
        if faults and THROTTLE.start <= now < THROTTLE.end:
            compute[1] *= 2.05
        slowest = max(compute)
        if faults and LOSS.start <= now < LOSS.end:
            comm *= 2.6 + draw.random()
        begin = now + slowest
        stall = 0.0
        if faults and begin < FLAP.start + 0.2 and begin + comm > FLAP.start:
            stall = 0.92
        for rank in range(4):
            steps[rank].append(
                Iteration(
                    index=index,
                    start_ns=T0 + int(now * S),
                    compute_ns=int(compute[rank] * S),
                    wait_ns=int((slowest - compute[rank]) * S),
                    comm_ns=int((comm + stall) * S),
                )
            )
            _spread(bins[rank], begin + stall, begin + stall + comm)
        now, index = begin + stall + comm + 0.01, index + 1
    return tuple(
        RankSeries(
            rank=rank,
            samples=tuple(
                Sample(T0 + number * 100 * MS, round(bins[rank].get(number, 0))) for number in range(int(seconds * 10))
            ),
            iterations=tuple(steps[rank]),
        )
        for rank in range(4)
    )


def _spread(bins: dict[int, float], start: float, end: float) -> None:
    for number in range(int(start * 10), int(end * 10) + 1):
        overlap = min(end, (number + 1) / 10) - max(start, number / 10)
        if overlap > 0:
            bins[number] = bins.get(number, 0) + RANK_BYTES * overlap / (end - start)


def _faults(*, fired: bool) -> tuple[FaultRun, ...]:
    return (
        _fault(
            "uplink",
            "link.flap",
            "rtsw1:ctsw1",
            FLAP,
            1.0,
            {},
            ("ctsw1:rtsw1.carrier_down_count", 1, "emulated"),
            {"host1:rxe0.send_err": 0, "host2:rxe0.send_err": 0},
            fired=fired,
        ),
        _fault(
            "loss",
            "packet.drop",
            "host3:rxe0",
            LOSS,
            3.0,
            {"share": 0.02},
            ("host3:rxe0.out_of_seq_request", 61, "real"),
            {"host2:rxe0.send_err": 0},
            fired=fired,
        ),
        _fault(
            "slow-gpu",
            "gpu.throttle",
            "host2:gpu0",
            THROTTLE,
            6.0,
            {"percent": 50},
            ("host2:gpu0.nr_throttled", 118, "emulated"),
            {"host1:gpu0.nr_throttled": 0, "host3:gpu0.nr_throttled": 0, "host4:gpu0.nr_throttled": 0},
            fired=fired,
        ),
    )


def _fault(fault_id, kind, target, window, length, parameters, moved, still, *, fired):
    counter, delta, fidelity = moved
    plan = FaultSpec(
        id=fault_id,
        kind=kind,
        target=target,
        at_s=window.start - 0.04,
        for_s=length,
        seed=1234,
        params=parameters,
    )
    receipt = Receipt(
        id=fault_id,
        kind=kind,
        target=target,
        fidelity=fidelity,
        armed=Armed(ok=True, at_ns=T0 + int(window.start * S) - 20 * MS, readback="as asked"),
        fired=Fired(
            count=delta if fired else 0,
            first_ns=T0 + int(window.start * S) if fired else None,
            last_ns=T0 + int(window.end * S) if fired else None,
            witness=counter,
            must_move={counter: delta if fired else 0},
            must_not_move=still,
        ),
        cleared=Cleared(ok=True, at_ns=T0 + int(window.end * S), readback="gone"),
        exposed=Exposure(uses=(USE,)),
    )
    return FaultRun(plan=plan, receipt=receipt)


def with_doubts(fault, *doubts):
    """Return a fault of a run that its injector does not believe."""
    return msgspec.structs.replace(fault, receipt=concluded(fault.receipt, doubts))


def fired_between(run, fault_id, early_ns, late_ns):
    """Return the run with a fault whose firing is known only to lie within an interval."""

    def observed(fault):
        first_ns = fault.receipt.fired.first_ns
        fired = msgspec.structs.replace(fault.receipt.fired, between_ns=(first_ns - early_ns, first_ns + late_ns))
        return msgspec.structs.replace(fault, receipt=msgspec.structs.replace(fault.receipt, fired=fired))

    return changed(
        run, faults=tuple(observed(fault) if fault.plan.id == fault_id else fault for fault in run.injected.faults)
    )
