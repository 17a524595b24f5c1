"""The engine's tasks on an in-memory fabric: pauses, grants, pacing and late receives."""

from __future__ import annotations

import gc
import importlib
import json
import random
import sys
import weakref
from types import SimpleNamespace

import house
import pytest
from engine_flows import flow_on
from memory_fabric import CLOCK, Fabric, Rnic, modules

from faultbed.inject.node.network import latereceives
from faultbed.traffic import schedules, traces
from faultbed.traffic.engine.run_results import Endpoint
from faultbed.traffic.flows import flow_run
from faultbed.traffic.node.flows import late, rnr
from faultbed.traffic.schedules import cost
from faultbed.traffic.traces import Operation, Trace
from faultbed.traffic.workloads import collective, inference, ranking, replay, replay_batches
from faultbed.traffic.workloads.collective import CollectiveSpec
from faultbed.traffic.workloads.inference import InferenceSpec
from faultbed.traffic.workloads.job import JobPhase, JobSpec, job_programs
from faultbed.traffic.workloads.ranking import RankingSpec
from faultbed.traffic.workloads.ranks import rank_plan
from faultbed.traffic.workloads.replay_batches import ReplaySpec

MS = 1_000_000
PLACES = [Endpoint(host=f"host{number}", rnic="rxe0", address="192.0.2.1") for number in (1, 2, 3, 4)]
TRACES = {
    "ranking": lambda: traces.load(house.TRACES / "ranking.json"),
    "pipeline": lambda: traces.load(house.TRACES / "pipeline"),
    "tensor-parallel": lambda: traces.load(house.TRACES / "tensor-parallel"),
    "inference": lambda: inference.request(
        InferenceSpec(prefill_ranks=2, tokens=4, prefill_ms=20, decode_ms=5, prefill_bytes=1 << 16, kv_bytes=1 << 15,
                      decode_bytes=1 << 12), 4),
    "recommendation": lambda: ranking.step(RankingSpec(embedding_bytes=1 << 15, skew=1.5, dense_bytes=1 << 12), 4),
}  # fmt: skip


@pytest.mark.parametrize("name", TRACES)
def test_ranks_replay_a_trace_in_order_with_pauses_and_correct_results(name, monkeypatch):
    node, fabric = modules(monkeypatch), Fabric(random.Random(7))
    spec = ReplaySpec(repeat=3, batch_bytes=1 << 26, segment_bytes=8192)
    (batch,) = replay_batches.batches(TRACES[name](), spec, cost.NETWORKS["soft"])
    plan = rank_plan(name, spec, PLACES, batch.programs, iterations=spec.repeat)
    for task in plan.tasks:
        made = node.rank.RankTask(task.name, Rnic("rxe0"), dict(task.spec), fabric.emit_for(task.name), None)
        fabric.tasks[task.name] = made
    fabric.connect(
        [fabric.connection(node, connection.index, connection.src, connection.dst) for connection in plan.connections]
    )
    fabric.run([task.name for task in plan.tasks])
    for rank, program in enumerate(batch.programs):
        actual = [fields for who, event, fields in fabric.events if who == f"rank{rank}" and event == "iteration"]
        assert [fields["wrong"] for fields in actual] == [0] * 3
        for fields in actual:
            ends = fields["phases_ns"]
            assert ends == sorted(ends)
            assert len(ends) == len(program["fences"]) + 1
            for row, paused_ns in zip(program["pauses"], fields["paused_ns"], strict=False):
                phase, pause_ns, not_before_ns = row
                steps = [0, *program["fences"], 1 << 40]
                assert paused_ns >= pause_ns
                if any(steps[phase] <= step < steps[phase + 1] for step, *_ in program["sends"]):
                    assert ends[phase] >= not_before_ns, "what it sends waits for its time"
        assert fabric.tasks[f"rank{rank}"].wake_ns is None


class StoppedRanks(Fabric):
    """A fabric on which the ranks receive the request to stop one after the other."""

    def __init__(self, choice):
        super().__init__(choice)
        self.stop_ns = CLOCK.monotonic_ns() + 200 * MS
        self.running = None

    def due(self, tick_ns):
        self.running = list(self.tasks.values()) if self.running is None else self.running
        while self.running and CLOCK.monotonic_ns() >= self.stop_ns:
            self.running.pop(self.choice.randrange(len(self.running))).stop(CLOCK.monotonic_ns())
            self.stop_ns += 7 * MS
        yield from (*super().due(tick_ns), self.stop_ns)


@pytest.mark.parametrize("size_bytes", [1 << 10, 1 << 18])
@pytest.mark.parametrize(
    ("grid", "phase"),
    [("tp=2,dp=2", "tp:all-reduce"), ("dp=4", "dp:all-reduce"), ("dp=4", "dp:reduce"), ("pp=4", "pp:send-recv")],
)
def test_job_that_is_stopped_ends_on_all_ranks(grid, phase, size_bytes, monkeypatch):
    """Rank 0 decided, and its peers learned that from its data. Ranks that receive none of it went on or hung."""
    node, fabric, events, rounds = modules(monkeypatch), StoppedRanks(random.Random(7)), [], {}
    along, collective_name = phase.split(":")
    sizes = tuple((name, int(size)) for name, size in (item.split("=") for item in grid.split(",")))
    phases = (JobPhase(along=along, collective=collective_name, size_bytes=size_bytes),)
    spec = JobSpec(grid=sizes, phases=phases, iterations=10_000)
    programs, _ = job_programs(spec, cost.NETWORKS["soft"])
    plan = rank_plan("job", spec, PLACES, programs, iterations=spec.iterations)

    def emit(event, **fields):
        """Do what the controller does when ranks stop."""
        events.append((event, fields))
        if event == "stopping":
            rounds[fields["task"]] = fields["round"]
            if len(rounds) == len(PLACES):
                for made in fabric.tasks.values():
                    made.end_after(max(rounds.values()))

    for task in plan.tasks:
        fabric.tasks[task.name] = node.rank.RankTask(task.name, Rnic("rxe0"), dict(task.spec), emit, None)
    fabric.connect(
        [fabric.connection(node, connection.index, connection.src, connection.dst) for connection in plan.connections]
    )
    fabric.run([task.name for task in plan.tasks])
    done = [fields["iterations"] for event, fields in events if event == "done"]
    assert len(done) == len(PLACES)
    assert len(set(done)) == 1, "every rank has the same iterations"
    assert 2 < done[0] < spec.iterations
    assert not any(fields["wrong"] for event, fields in events if event == "iteration")


def test_rank_close_frees_its_memory_at_once(monkeypatch):
    """An engine that ran several collectives used to keep all buffers until the VM ran out of memory."""
    node, fabric = modules(monkeypatch), Fabric(random.Random(7))
    spec = CollectiveSpec(size_bytes=1 << 16, segment_bytes=8192)
    schedule = schedules.build("all-reduce", "ring", cost.shape_for(4, spec.size_bytes))
    programs = schedules.programs(schedule, collective.layout(spec, 4))
    plan = rank_plan("x", spec, PLACES, programs, iterations=1)
    task = plan.tasks[0]
    gc.disable()
    try:
        made = node.rank.RankTask(task.name, Rnic("rxe0"), dict(task.spec), fabric.emit_for(task.name), None)
        made.conns = {lane[0]: node.task.Conn(made, lane[0]) for lane in task.spec["lanes"]}
        buffer = weakref.ref(made.memory.array)
        made.close()
        del made
        assert buffer() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("senders", "admit", "messages"), [(3, 2, 40), (5, 1, 64), (2, 4, 10), (3, 2, 7), (3, 1, None)]
)
def test_admitted_flows_never_exceed_the_granted_chains(senders, admit, messages, monkeypatch):
    node, fabric = modules(monkeypatch), Fabric(random.Random(7), delay_ns=300_000)
    rnic, names, connections = Rnic("rxe0"), [], []
    for number in range(senders):
        spec = flow_run.FlowSpec(
            src=f"host{number + 2}", dst="host1", message_bytes=4096, chain=4, depth=16, admit=admit,
            messages=messages, duration_s=None if messages else 0.4,
        )  # fmt: skip
        engine_spec = flow_run.engine_spec(spec)
        tx, rx = f"tx{number}", f"rx{number}"
        fabric.tasks[tx] = node.admission.AdmittedSender(tx, Rnic("rxe0"), engine_spec, fabric.emit_for(tx))
        fabric.tasks[rx] = node.admission.AdmittedReceiver(rx, rnic, engine_spec, fabric.emit_for(rx))
        connections.append(fabric.connection(node, number, tx, rx))
        names.append(tx)
    fabric.connect(connections)
    fabric.run(names)
    sent = [fields["totals"][0]["messages"] for _, event, fields in fabric.events if event == "done"]
    assert fabric.most_under_way == min(admit, senders)
    if messages:
        assert sent == [messages] * senders
    else:
        assert max(sent) - min(sent) <= 8, "everybody has a turn after every turn"


def test_queue_pairs_that_share_a_rate_send_equally(monkeypatch):
    """The first queue pair used to take the whole rate, and probes on the others were never sent."""
    node, fabric = modules(monkeypatch), Fabric(random.Random(7))
    spec = flow_run.FlowSpec(src="host1", dst="host2", message_bytes=512, qps=4, rate_bps=512 * 8 * 400, duration_s=0.5)
    engine_spec = flow_run.engine_spec(spec)
    fabric.tasks["tx"] = node.flow.FlowSender("tx", Rnic("rxe0"), engine_spec, fabric.emit_for("tx"))
    fabric.tasks["rx"] = node.flow.FlowReceiver("rx", Rnic("rxe0"), engine_spec, fabric.emit_for("rx"))
    fabric.connect([fabric.connection(node, number, "tx", "rx") for number in range(4)])
    fabric.run(["tx"])
    (done,) = [fields for _, event, fields in fabric.events if event == "done"]
    sent = [total["messages"] for total in done["totals"]]
    assert min(sent) > 0.5 * max(sent), sent


class Silent(Fabric):
    """A fabric that carries nothing after a time: its queue pairs retry, and their requests are never completed."""

    def __init__(self, silent_from_ns):
        super().__init__(random.Random(7))
        self.silent_from_ns = silent_from_ns

    def carry(self, qp, chain):
        if CLOCK.monotonic_ns() < self.silent_from_ns:
            super().carry(qp, chain)


@pytest.mark.parametrize("change", [{"qps": 1}, {"qps": 2, "verb": "send"}])
def test_flow_that_stands_still_at_its_end_counts_that_time(change, monkeypatch):
    """The rate used to be that of the time before: a flow that was dead for most of its time looked fast."""
    fabric = Silent(CLOCK.monotonic_ns() + 10**9)
    flow_on(monkeypatch, fabric, depth=4, chain=2, duration_s=5.0, **change)
    fabric.run(["tx"])
    (done,) = [fields for _, event, fields in fabric.events if event == "done"]
    assert done["end_ns"] - done["start_ns"] >= 5e9
    assert 0 < max(total["last_ns"] for total in done["totals"]) - done["start_ns"] < 1.2e9, "or nothing was shown"


def test_flow_that_is_never_acknowledged_has_a_window(monkeypatch):
    fabric = Silent(0)
    flow_on(monkeypatch, fabric, duration_s=1.0)
    fabric.run(["tx"])
    (done,) = [fields for _, event, fields in fabric.events if event == "done"]
    assert 1e9 <= done["end_ns"] - done["start_ns"] < 5e9


def test_flow_of_messages_ends_with_its_last_one(monkeypatch):
    fabric = Fabric(random.Random(7))
    flow_on(monkeypatch, fabric, messages=40)
    fabric.run(["tx"])
    (done,) = [fields for _, event, fields in fabric.events if event == "done"]
    assert done["end_ns"] == max(total["last_ns"] for total in done["totals"])


def test_replay_deadline_covers_all_operations_a_rank_may_wait_for(monkeypatch):
    """In a pipeline, each message is in time, but together they take longer than the deadline of one operation."""
    node, fabric = modules(monkeypatch), Fabric(random.Random(7), delay_ns=100 * MS)
    chain = tuple(
        Operation(
            record=number, collective="p2p", members=(number % 4, (number + 1) % 4), size_bytes=4096,
            pauses_ns=(0, 0), not_before_ns=(0, 0),
        )
        for number in range(12)
    )  # fmt: skip
    trace = Trace(source="chain", format="made", ranks=4, operations=chain)
    spec = ReplaySpec(deadline_s=0.25)
    batch = replay_batches.whole(trace, spec, cost.NETWORKS["soft"])
    plan = replay._plan(spec, PLACES, batch, 0, 1)
    for task in plan.tasks:
        made = node.rank.RankTask(task.name, Rnic("rxe0"), dict(task.spec), fabric.emit_for(task.name), None)
        fabric.tasks[task.name] = made
    fabric.connect(
        [fabric.connection(node, connection.index, connection.src, connection.dst) for connection in plan.connections]
    )
    fabric.run([task.name for task in plan.tasks])
    whole_ns = max(fields["comm_ns"] for _, event, fields in fabric.events if event == "iteration")
    assert whole_ns > spec.deadline_s * 1e9, "or nothing was shown"
    assert "overdue" not in [event for _, event, _ in fabric.events]


@pytest.mark.parametrize("verb", ["send", "write-imm"])
def test_receiver_with_credits_never_sends_rnr_naks(verb, monkeypatch):
    fabric = Fabric(random.Random(7), delay_ns=100_000, rnr_retry=0)
    flow_on(monkeypatch, fabric, verb=verb, messages=300, qps=2, depth=8, chain=4)
    fabric.run(["tx"])
    (done,) = [fields for _, event, fields in fabric.events if event == "done"]
    assert [total["messages"] for total in done["totals"]] == [150, 150]
    assert (fabric.naks, done["rnr"]) == (0, None)


@pytest.mark.parametrize("verb", ["send", "write-imm"])
def test_late_receives_delay_a_sender_that_then_continues(verb, monkeypatch):
    """A receive is posted 4 ms after the message before, so the sender repeatedly gets RNR NAKs."""
    fabric = Fabric(random.Random(7), delay_ns=100_000, rnr_retry=7 * 10**6)
    flow_on(monkeypatch, fabric, verb=verb, messages=20, late_receives_ms=4.0)
    fabric.run(["tx"])
    (done,) = [fields for _, event, fields in fabric.events if event == "done"]
    assert done["totals"][0]["messages"] == 20
    assert fabric.naks >= 19, "each but the first met it"
    assert done["end_ns"] - done["start_ns"] >= 19 * 4 * MS
    assert done["rnr"] == {}, "this RNIC counts nothing"


def test_sender_out_of_rnr_retries_loses_its_queue_pair(monkeypatch):
    fabric = Fabric(random.Random(7), delay_ns=100_000, rnr_retry=2)
    flow_on(monkeypatch, fabric, verb="send", messages=4, late_receives_ms=1000.0)
    with pytest.raises(AssertionError, match="wait for each other"):  # no controller rebuilds the connection
        fabric.run(["tx"], seconds=1.0)
    (error,) = [fields for _, event, fields in fabric.events if event == "qp_error"]
    assert (error["status"], fabric.naks) == ("RNR_RETRY_EXC_ERR", 3)


def test_late_receive_of_a_lost_queue_pair_is_not_posted_on_its_replacement(monkeypatch):
    """Only one receive is posted at a time, and the new queue pair has its own."""
    fabric = Fabric(random.Random(7), rnr_retry=0)
    flow_on(monkeypatch, fabric, verb="send", messages=4, qps=2, late_receives_ms=1.0)
    receiver = fabric.tasks["rx"]
    for conn in receiver.conns.values():
        conn.qp.receives.clear()  # the receive was consumed
        receiver.on_recv(conn, 0, CLOCK.monotonic_ns())
    gone = receiver.conns[0]
    gone.generation += 1
    receiver.joined(gone)
    while receiver.wake_ns is not None:
        receiver.wake(receiver.wake_ns)
    assert [len(conn.qp.receives) for conn in receiver.conns.values()] == [1, 1]


class Interfered(Fabric):
    """A fabric on which a fault makes receives late from the third message on, and ends after some NAKs."""

    def __init__(self, path, late_ms, naks):
        super().__init__(random.Random(7), delay_ns=100_000, rnr_retry=7 * 10**6)
        self.path, self.late_ms, self.until, self.messages = path, late_ms, naks, 0

    def spoilt(self, *message):
        self.messages += 1
        if self.messages == 3:
            self.path.write_text(f"{self.late_ms}\n")
            self.look()
        return message

    def not_ready(self, conn, now_ns):
        super().not_ready(conn, now_ns)
        if self.naks == self.until:
            self.path.unlink()
            self.look()

    def look(self):
        """Check the fault file now, because this fabric could be done before the engine's next tick."""
        for task in self.tasks.values():
            task.late_receives.check_fault()


@pytest.fixture
def late_path(tmp_path, monkeypatch):
    monkeypatch.setattr(late, "PATH", str(tmp_path / "late-receives"))
    return tmp_path / "late-receives"


@pytest.mark.parametrize("late_ms", [0, 30])
@pytest.mark.parametrize("verb", ["send", "write-imm"])
def test_late_receives_fault_delays_a_flow_that_then_continues(verb, late_ms, late_path, monkeypatch):
    """With 0, no receive is posted during the fault; the held-back receives are posted when it ends."""
    fabric = Interfered(late_path, late_ms, naks=40)
    flow_on(monkeypatch, fabric, verb=verb, messages=4000, qps=2, depth=4)
    fabric.run(["tx"])
    (done,) = [fields for _, event, fields in fabric.events if event == "done"]
    assert [total["messages"] for total in done["totals"]] == [2000, 2000]
    assert fabric.naks >= 40
    assert not late_path.exists()
    receives = [
        len(conn.qp.receives) + len(conn.task.late_receives.delayed) for conn in fabric.tasks["rx"].conns.values()
    ]
    assert receives == [8, 8], "each that was taken is posted again, once"


def test_late_receives_fault_delays_a_collective_with_correct_results(late_path, monkeypatch):
    node, fabric = modules(monkeypatch), Interfered(late_path, 0, naks=40)
    spec = CollectiveSpec(size_bytes=1 << 16, segment_bytes=1024)
    schedule = schedules.build("all-reduce", "ring", cost.shape_for(4, spec.size_bytes))
    programs = schedules.programs(schedule, collective.layout(spec, 4))
    plan = rank_plan("ring", spec, PLACES, programs, iterations=12)
    for task in plan.tasks:
        made = node.rank.RankTask(task.name, Rnic("rxe0"), dict(task.spec), fabric.emit_for(task.name), None)
        fabric.tasks[task.name] = made
    fabric.connect(
        [fabric.connection(node, connection.index, connection.src, connection.dst) for connection in plan.connections]
    )
    fabric.run([task.name for task in plan.tasks])
    wrong = [fields["wrong"] for _, event, fields in fabric.events if event == "iteration"]
    assert wrong == [0] * 48
    assert fabric.naks >= 40


def test_late_receives_without_a_valid_fault_file_delay_nothing(late_path):
    one = late.LateReceives()
    for content in ("", "soon", "-"):
        late_path.write_text(content)
        one.check_fault()
        assert one.ns == 0
    late_path.write_text("250\n")
    one.check_fault()
    assert one.ns == 250 * MS
    late_path.unlink()
    one.check_fault()
    assert one.ns == 0


def test_late_receives_fault_and_engine_use_the_same_file():
    """`inject` and `traffic` may not import each other, so nothing else ensures this."""
    assert latereceives.FILE == late.PATH


def test_rnr_count_reads_the_counter_names_of_each_driver(tmp_path, monkeypatch):
    monkeypatch.setattr(rnr, "SYSFS", str(tmp_path))
    folder = tmp_path / "mlx5_0" / "ports" / "1" / "hw_counters"
    folder.mkdir(parents=True)
    (folder / "rnr_nak_retry_err").write_text("40\n")
    count = rnr.RnrCount("mlx5_0")
    count.begin()
    (folder / "rnr_nak_retry_err").write_text("42\n")
    assert count.growth() == {"naks": {"counter": "rnr_nak_retry_err", "count": 2}}


@pytest.fixture
def engine(monkeypatch):
    """Return an engine without verbs, and the messages that it writes to the controller."""
    modules(monkeypatch)
    monkeypatch.delitem(sys.modules, "faultbed.traffic.node.engine", raising=False)
    module = importlib.import_module("faultbed.traffic.node.engine")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    made, made.written = module.Engine(), []
    monkeypatch.setattr(module, "os", SimpleNamespace(write=lambda _fd, data: made.written.append(data) or len(data)))
    return made


def test_engine_writes_an_iteration_before_any_later_event(engine):
    engine.emit("iteration", index=0)
    engine.emit("iteration", index=1)
    assert engine.written == []
    engine.emit("done", task="rank0")
    lines = b"".join(engine.written).splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["iteration", "iteration", "done"]


def test_engine_writes_iterations_together_at_the_tick(engine):
    engine.emit("iteration", index=0)
    engine._wait(0)
    engine.emit("iteration", index=1)
    assert engine.written == []
    engine._tick(0)
    (written,) = engine.written
    assert [json.loads(line)["index"] for line in written.splitlines()] == [0, 1]


def test_engine_with_nothing_to_do_writes_the_iterations_of_a_job_with_checkpoints(engine):
    engine.tasks["rank0"] = SimpleNamespace(keeps_checkpoints=True, slept=lambda *_: None)
    engine.emit("iteration", index=0)
    assert engine.written == []
    engine._wait(1 << 62)  # it returns at once, because there is output to write
    assert len(engine.written) == 1


def test_engine_arms_the_notification_after_the_polls_and_settles_once_per_batch(engine):
    calls = []

    class Recorded:
        def completion(self, _conn, wc, _now_ns):
            calls.append(wc.wr_id)

        def settle(self, _now_ns):
            calls.append("settle")

    engine.by_qpn["rxe0", 17] = SimpleNamespace(task=Recorded())
    batches = [[1, 2], [3], []]

    def polled(batch):
        return [SimpleNamespace(qp_num=17, wr_id=number) for number in batch]

    rnic = SimpleNamespace(
        name="rxe0",
        clear_event=lambda: calls.append("clear"),
        poll=lambda: polled(batches.pop(0)),
        drain=lambda: calls.append("arm") or polled([4]),
    )
    engine._completions(rnic)
    assert calls == ["clear", 1, 2, "settle", 3, "settle", "arm", 4, "settle"]


def test_engine_with_completions_without_end_gives_other_work_its_turn(engine):
    polls = []
    rnic = SimpleNamespace(
        name="rxe0",
        clear_event=lambda: None,
        poll=lambda: polls.append(1) or [SimpleNamespace(qp_num=0)],
        drain=list,
    )
    engine._completions(rnic)
    assert 0 < len(polls) < 10
