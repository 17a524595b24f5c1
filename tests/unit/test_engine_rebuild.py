"""A connection that is made again: nobody waits for ever, whichever end may send first and whatever happens between."""

from __future__ import annotations

import heapq
import random
import time
from types import SimpleNamespace

import pytest
from memory_fabric import Fabric, Rc, Rnic, modules

from traffic import collective, cost, schedules
from traffic.cabling import Cabling
from traffic.collective import CollectiveSpec
from traffic.plan import Cable
from traffic.ranks import rank_plan
from traffic.results import Endpoint

PLACES = [Endpoint(host=f"host{number}", rnic="rxe0", address="192.0.2.1") for number in (1, 2, 3, 4)]


class MadeAgain(Fabric):
    """A fabric that loses a connection, with what is under way on it."""

    def make_again(self, first, last, meanwhile):
        """Both ends join; one may send, then something happens, then the other one may."""
        self.queue = [item for item in self.queue if item[2] not in (first, last)]
        heapq.heapify(self.queue)
        for end in (first, last):
            end.state, end.rebuilding, end.rc = "ready", True, Rc(self, end)
            end.generation += 1
            end.told = {**end.task.endpoint(end), "psn": 256}
        for end in (first, last):
            end.peer, end.state = end.other.told, "joined"
            end.task.joined(end)
        first.state = "up"
        first.task.go(first, time.monotonic_ns())
        meanwhile()
        last.state = "up"
        last.task.go(last, time.monotonic_ns())


@pytest.fixture
def ring(monkeypatch):
    """Four ranks of a ring whose ranks send more than their peer has slots for; all but rank 1 have begun."""
    node, fabric = modules(monkeypatch), MadeAgain(random.Random(7))
    spec = CollectiveSpec(algorithm="ring", size_bytes=1 << 18, segment_bytes=4096)
    schedule = schedules.build("all-reduce", "ring", cost.shape_for(4, spec.size_bytes))
    plan = rank_plan("x", spec, PLACES, schedules.programs(schedule, collective.layout(spec, 4)), iterations=3)
    for task in plan.tasks:
        made = node.rank.RankTask(task.name, Rnic("rxe0"), dict(task.spec), fabric.emit_for(task.name), None)
        fabric.tasks[task.name] = made
    fabric.connect([fabric.cable(node, cable.index, cable.src, cable.dst) for cable in plan.cables])
    for name in ("rank0", "rank2", "rank3"):
        fabric.tasks[name].begin(time.monotonic_ns())
    return fabric


@pytest.mark.parametrize("first", ["sender", "receiver"])
def test_ranks_go_on_whichever_end_of_a_connection_made_again_is_there_first(ring, first):
    """The last one has nothing to lose: neither credits that it could not send yet, nor those that came early."""
    late = ring.tasks["rank1"]
    receiver = late.conns[late.ins[0].number]

    def begin():
        late.begin(time.monotonic_ns())
        ring.drain()

    if first == "receiver":
        ring.drain()
        assert late.ins[0].received == late.slots
        ring.make_again(receiver, receiver.other, begin)
    else:
        ring.make_again(receiver.other, receiver, begin)
    ring.drain()
    assert all(task.finished for task in ring.tasks.values()), "they wait for each other"
    assert [fields["wrong"] for _, event, fields in ring.events if event == "iteration"] == [0] * 3 * len(PLACES)


def test_an_end_that_is_lost_before_the_other_one_has_joined_is_not_waited_for():
    """The other one would come up, have nothing to send, and hear of nothing."""
    told, place = [], SimpleNamespace(host="host1", name="host1:rxe0", address="192.0.2.1")
    tasks = tuple(SimpleNamespace(name=name, endpoint=place, spec={}) for name in ("a", "b"))
    plan = SimpleNamespace(tasks=tasks, cables=(Cable(index=0, src="a", dst="b"),), peer_deadline_s=30.0)
    cabling = Cabling(plan, lambda _host, message: told.append(message), lambda *_args, **_fields: None)
    cabling.make_all()

    def say(event, task, generation=0, **fields):
        cabling.handle(event, {"task": task, "conn": 0, "generation": generation, **fields}, time.monotonic_ns())

    for task in ("a", "b"):
        say("qp", task, end={"qpn": 17, "psn": 256})
    say("joined", "a")
    say("qp_error", "a", qpn=17, status="WR_FLUSH_ERR", at_ns=time.monotonic_ns())
    say("joined", "b")
    cabling.retry_due(time.monotonic_ns())
    assert [(message["do"], message["task"]) for message in told if message["generation"] == 1] == [
        ("qp", "a"),
        ("qp", "b"),
    ]
    say("qp_error", "b", qpn=17, status="RETRY_EXC_ERR", at_ns=time.monotonic_ns())
    cabling.retry_due(time.monotonic_ns())
    assert [message for message in told if message["generation"] > 1] == [], "it was of the one before"
