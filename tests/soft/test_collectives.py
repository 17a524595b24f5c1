"""Collectives over real queue pairs: every algorithm, every element type, every element of every result."""

import time

import pytest

from traffic import collective
from traffic.collective import CollectiveSpec
from traffic.engine import Engines
from traffic.plan import QpParams
from traffic.schedules import ALGORITHMS

pytestmark = [pytest.mark.soft, pytest.mark.needs("hosts >= 4")]

PATIENT = QpParams(timeout=18)
"""An ACK timeout of 1.07 s: on a busy machine a virtual CPU that pauses is not a lost packet."""

TYPES = ("fp32", "fp16", "bf16", "int32")
REDOPS = ("sum", "max", "avg")


def test_every_algorithm_gives_the_right_result(lab, subtests):
    """Uneven blocks, several segments a block, few slots, another type and reduction each time; inputs unharmed."""
    with Engines.start(lab, [host.name for host in lab.topology.hosts[:4]]) as engines:
        for number, (name, algorithm) in enumerate(ALGORITHMS):
            dtype = TYPES[number % len(TYPES)]
            elements = 20_000 if name == "all-to-all" else 20_003
            spec = CollectiveSpec(
                collective=name,
                algorithm=algorithm,
                ranks=tuple(f"{host.name}:{host.rnics[0].name}" for host in lab.topology.hosts[:4]),
                dtype=dtype,
                redop=REDOPS[number % len(REDOPS)],
                root=number % 4,
                skew=0.7,
                size_bytes=elements * collective.ITEM_BYTES[dtype],
                segment_bytes=8192,
                slots=4,
                iterations=2,
                qp=PATIENT,
            )
            result = collective.start(lab, spec, engines=engines).wait(120.0)
            with subtests.test(collective=name, algorithm=algorithm, dtype=dtype, redop=spec.redop):
                assert result.outcome == "completed", result.where
                assert result.wrong_elements == 0
                assert result.iterations_completed == 2
                assert result.checked_elements >= 2 * (16 if name == "barrier" else elements)


@pytest.mark.parametrize(
    ("signal", "deadline_s", "says"), [("KILL", 60.0, "engine is gone"), ("STOP", 6.0, "not over after")]
)
def test_a_rank_that_goes_away_is_a_typed_failure_of_all_the_others(lab, signal, deadline_s, says):
    """Killed, it is seen at once; stopped, when its peers' deadline is over, for the kernel goes on acknowledging."""
    hosts = [host.name for host in lab.topology.hosts[:4]]
    with Engines.start(lab, hosts) as engines:
        spec = CollectiveSpec(size_bytes=1 << 17, duration_s=300.0, deadline_s=deadline_s, qp=PATIENT)
        job = collective.start(lab, spec, engines=engines)
        wait_for_iterations(job, 2 * len(hosts))
        before = job.dump()
        victim = str(engines.pids[hosts[2]])
        lab.node(hosts[2]).run(["kill", f"-{signal}", victim])
        began = time.monotonic()
        try:
            result = job.wait(120.0)
        finally:
            lab.node(hosts[2]).run(["kill", "-KILL", victim], check=False)
        took_s = time.monotonic() - began

    assert result.outcome == "failed"
    assert says in result.where
    assert took_s < deadline_s + 20.0, "its end is to come by the deadline"
    assert [end.outcome for end in result.ends] == ["failed"] * 4
    assert result.ends[2].where == "nothing was heard of it at the end"
    for rank in (0, 1, 3):
        assert result.ends[rank].where.startswith("iteration ")
    assert any("waits for segment" in end.where for end in result.ends)
    assert result.wrong_elements == 0
    # The recorders tell the same story: of all ranks while they ran, of those that were left at the end.
    assert sorted(flight.rank for flight in before.values()) == [0, 1, 2, 3]
    assert sorted(flight.rank for flight in result.flights) == [0, 1, 3]
    for flight in result.flights:
        assert {"begin", "post", "ack", "arrive", "apply"} <= {entry.what for entry in flight.entries}
        times = [entry.at_ns for entry in flight.entries]
        assert times == sorted(times)


def wait_for_iterations(job, count):
    deadline = time.monotonic() + 60.0
    while sum(event.name == "iteration" for event in list(job.events)) < count:
        assert time.monotonic() < deadline, "no iterations"
        time.sleep(0.1)
