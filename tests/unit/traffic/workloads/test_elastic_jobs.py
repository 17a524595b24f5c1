"""Jobs with real engines and storage on this machine: a lost host does not change the result."""

from __future__ import annotations

import _thread
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from local_traffic import LocalLab
from waiting import until, wait_s

from faultbed.testbed.errors import LabError, UsageError
from faultbed.testbed.node.gpu import health
from faultbed.testbed.observe.clock import ClockOffset
from faultbed.traffic.engine import engine_client
from faultbed.traffic.workloads.elastic import driver, loss, rejoin
from faultbed.traffic.workloads.elastic.machine import Policy
from faultbed.traffic.workloads.elastic.resilience import Resilience
from faultbed.traffic.workloads.job import JobPhase, JobSpec
from faultbed.traffic.workloads.storage_service import Storage

EVERY = 20
S = 1_000_000_000
PATIENCE_S = 180.0
SPEC = JobSpec(
    grid=(("dp", 3),),
    phases=(JobPhase(along="dp", collective="all-reduce", size_bytes=1 << 14),),
    ranks=("host1:rxe0", "host2:rxe0", "host3:rxe0"),
    iterations=200,
    warmup=1,
    storage=Storage(host="host6", checkpoint_bytes=1 << 15, every=EVERY),
    peer_deadline_s=PATIENCE_S,  # a busy machine is no loss
    op_deadline_s=PATIENCE_S,
)


@pytest.fixture
def lab(tmp_path, monkeypatch):
    monkeypatch.setattr(driver.storage, "serve", served_from(tmp_path))
    monkeypatch.setattr(loss, "SILENT_AFTER_ERROR_NS", 20 * S)  # a busy machine must not count as a loss
    monkeypatch.setattr(rejoin, "RETRY_S", 0.3)
    made = LocalLab(tmp_path)
    yield made
    made.close()


def late_by(error_ns):
    """Measure clocks that are off by `error_ns`, and know it."""
    measure = engine_client.clock.measure

    def measured(channel, **options):
        offset = measure(channel, **options)
        return replace(offset, offset_ns=offset.offset_ns - error_ns, error_ns=offset.error_ns + error_ns)

    return measured


def served_from(tmp_path):
    """Keep checkpoints of tests apart from those of labs."""
    plain = driver.storage.serve
    return lambda *args, **options: plain(*args, **options, folder=str(tmp_path / "checkpoints"))


def started(lab, spec=SPEC, *, restores=True, spares=("host5:rxe0",), on_event=None, **policy):
    resilience = Resilience(policy=Policy(**policy), spares=spares, rejoin_s=20, restores=restores)
    return driver.start(lab, spec, resilience, on_event)


def after(running, iterations):
    """Wait until the job has finished this many iterations. It must not end earlier."""
    until(lambda: running.job.finished >= iterations or running.is_over, within_s=PATIENCE_S, every_s=0.005)
    assert running.job.finished >= iterations, running.failure


def in_phase(running, phase):
    """Wait for a phase of the job. It must not end earlier."""
    until(lambda: running.job.phase == phase or running.is_over, within_s=PATIENCE_S, every_s=0.001)
    assert running.job.phase == phase, running.failure


def digests(result):
    return {state.sha256 for state in result.states}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return the digests of the final state of a job without a loss."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    lab = LocalLab(folder)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(driver.storage, "serve", served_from(folder))
            result = started(lab).wait(PATIENCE_S)
    finally:
        lab.close()
    assert (result.outcome, result.restarts, result.repeated_iterations) == ("completed", (), 0)
    assert [state.wrong for state in result.states] == [0, 0, 0]
    assert result.states[0].elements == 4096
    return digests(result)


def assert_right(result, uninterrupted, restarts=1, every=EVERY, last=SPEC.iterations - 1):
    """Check a job's result. Its last record must be that of iteration `last` or a later one."""
    assert result.outcome == "recovered", result.where
    assert [state.wrong for state in result.states] == [0] * len(result.ranks)
    assert {state.iterations for state in result.states} == {SPEC.iterations}
    assert digests(result) == uninterrupted
    assert result.wrong_elements == 0
    assert len(result.restarts) == restarts
    indices = {tuple(one.index for one in ranked) for ranked in result.iterations}
    (recorded,) = indices  # equal for every rank
    # A killed engine may lose the records of its last iterations.
    assert len(recorded) >= SPEC.iterations - 3 * restarts
    assert last <= recorded[-1] < SPEC.iterations
    for restart in result.restarts:
        assert restart.lost_iterations is None or restart.lost_iterations <= every


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_job_whose_host_is_lost_restarts_on_the_spare_with_the_same_result(lab, uninterrupted, monkeypatch, how):
    monkeypatch.setattr(loss, "SILENT_AFTER_ERROR_NS", {"kill": 20 * S, "freeze": 4 * S}[how])
    running = started(lab)
    after(running, 60)
    getattr(lab, how)("host2")
    result = running.wait(PATIENCE_S)
    assert_right(result, uninterrupted)
    assert result.ranks == ("host1:rxe0", "host5:rxe0", "host3:rxe0")
    assert {(sample.task, sample.endpoint) for sample in result.samples} == {
        (f"rank{rank}", name) for rank, name in enumerate(result.ranks)
    }
    (restart,) = result.restarts
    assert (restart.cause, restart.hosts) == ("host", ("host2",))
    marks = [
        restart.progress_ns, restart.noticed_ns, restart.diagnosed_ns, restart.rescheduled_ns, restart.initialised_ns,
        restart.restored_ns, restart.caught_up_ns,
    ]  # fmt: skip
    assert None not in marks
    assert marks == sorted(marks)
    assert restart.iterations >= 60 > restart.lost_iterations
    assert restart.restored_iterations % EVERY == 0
    assert result.repeated_iterations >= restart.lost_iterations


def test_job_whose_process_is_killed_restarts_on_the_same_host(lab, uninterrupted, monkeypatch):
    """The connection to the host is kept: it also carries the fault holders, captures and the storage of that host."""
    forgotten = []
    monkeypatch.setattr(lab, "forget", forgotten.append)
    running = started(lab, restart="same", spares=())
    after(running, 50)
    lab.kill("host3", is_dead=False)
    result = running.wait(PATIENCE_S)
    assert_right(result, uninterrupted)
    assert (result.restarts[0].cause, result.ranks) == ("process", SPEC.ranks)
    assert forgotten == []


GPU_PROGRAM = """
import sys
from faultbed.testbed.node.gpu import health
health.FOLDER = sys.argv[1]
from faultbed.traffic.node import softgpu
softgpu.serve(sys.argv[2])
"""


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """Start a real soft GPU for each host of the job and its spare, with health registers in a folder of this test."""
    monkeypatch.setattr(health, "FOLDER", str(tmp_path / "health"))
    paths = {host: str(tmp_path / f"{host}.sock") for host in ("host1", "host2", "host3", "host5")}
    monkeypatch.setattr(driver, "gpus_of", lambda _lab, _spec, ranks: [{"socket": paths[rank.host]} for rank in ranks])
    programs = {
        host: subprocess.Popen([sys.executable, "-c", GPU_PROGRAM, health.FOLDER, path]) for host, path in paths.items()
    }
    until(lambda: all(Path(path).exists() for path in paths.values()), within_s=PATIENCE_S)
    yield programs
    for program in programs.values():
        program.kill()
        program.wait()


@pytest.mark.parametrize("how", ["contained", "uncontained", "lost"])
def test_job_whose_gpu_fails_a_rank_restarts_on_the_spare_with_the_same_result(lab, uninterrupted, gpus, how):
    """The host answers all the time, but the job must leave it: a GPU with an uncorrected error is to be drained."""
    running = started(lab, replace(SPEC, compute_units=1))
    after(running, 50)
    if how == "lost":
        gpus["host2"].kill()
    else:
        health.Health("host2").set("memory", ecc_uncorrected=1, error=how)
    result = running.wait(PATIENCE_S)
    assert_right(result, uninterrupted)
    assert result.ranks == ("host1:rxe0", "host5:rxe0", "host3:rxe0")
    (restart,) = result.restarts
    assert (restart.cause, restart.hosts) == ("gpu", ("host2",))
    assert {"contained": "XID 94", "uncontained": "XID 95", "lost": "is gone"}[how] in restart.reason


def test_job_waits_for_a_host_that_comes_back(lab, uninterrupted, monkeypatch):
    """Each attempt opens a new connection to the host, and events must not shorten the pauses between attempts."""
    attempts = []
    monkeypatch.setattr(lab, "forget", lambda host: attempts.append((time.monotonic(), host)))
    running = started(lab, restart="same", spares=())
    after(running, 50)
    lab.kill("host1")
    in_phase(running, "initialise")
    until(lambda: len(attempts) >= 3)
    assert running.job.phase == "initialise"
    lab.revive("host1")
    assert_right(running.wait(PATIENCE_S), uninterrupted)
    assert {host for _, host in attempts} == {"host1"}
    assert all(later - before >= rejoin.RETRY_S for (before, _), (later, _) in pairwise(attempts))


def test_job_waits_only_once_for_a_host_that_stays_away(lab):
    running = driver.start(lab, SPEC, Resilience(policy=Policy(restart="same"), rejoin_s=1))
    after(running, 20)
    lab.kill("host1")
    result = running.wait(PATIENCE_S)
    assert (result.outcome, len(result.restarts)) == ("failed", 1)
    assert result.where == "host1: the traffic engine did not start: host1: no answer; the job waited 1 s for its host"


def test_hosts_that_are_lost_together_share_the_time_to_come_back(lab, uninterrupted, monkeypatch):
    """Otherwise a restart would wait `rejoin_s` for each lost host, longer than the job may take."""
    patience = []

    def slowly(*args, patience_s, **options):
        patience.append(patience_s)
        wait_s(0.5)
        rejoin.start_engine(*args, patience_s=patience_s, **options)

    monkeypatch.setattr(driver, "start_engine", slowly)
    running = started(lab, restart="same", spares=())
    after(running, 50)
    lab.freeze("host3")  # nothing goes on between the two losses
    for host in ("host1", "host2"):
        lab.kill(host)
    for host in ("host1", "host2"):
        lab.revive(host)
    lab.thaw("host3")
    assert_right(running.wait(PATIENCE_S), uninterrupted)
    assert len(patience) == 2
    assert patience[0] > 19
    assert patience[1] <= patience[0] - 0.5


def test_two_losses_with_one_spare_fail_with_the_reason(lab):
    running = started(lab)
    after(running, 30)
    lab.freeze("host3")  # nothing goes on between the two losses
    for host in ("host1", "host2"):
        lab.kill(host)
    lab.thaw("host3")
    result = running.wait(PATIENCE_S)
    assert result.outcome == "failed"
    assert "1 spares are left for host1:rxe0, host2:rxe0" in result.where


def test_loss_of_the_spare_during_the_restart_takes_the_next_one(lab, uninterrupted):
    running = started(lab, spares=("host4:rxe0", "host5:rxe0"))
    after(running, 30)
    lab.kill("host2")
    in_phase(running, "initialise")
    lab.kill(running.job.ranks[1].partition(":")[0])
    result = running.wait(PATIENCE_S)
    assert_right(result, uninterrupted, restarts=2)
    assert set(result.ranks) & {"host4:rxe0", "host5:rxe0"}


def losing(lab, host, *phases):
    """Return a listener that kills a host when the job's first restart enters one of these phases."""

    def listen(event):
        if event["event"] == "restart" and event["phase"] in phases and event["restart"].number == 1:
            lab.kill(host)

    return listen


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["diagnose", "reschedule", "initialise", "restore", "catch_up"])
def test_loss_of_another_rank_in_a_phase_of_the_recovery_ends_in_the_same_state(lab, uninterrupted, phase):
    resilience = Resilience(policy=Policy(), spares=("host4:rxe0", "host5:rxe0"), rejoin_s=20)
    running = driver.start(lab, SPEC, resilience, losing(lab, "host3", phase))
    after(running, 60)
    lab.kill("host2")
    result = running.wait(PATIENCE_S)
    assert result.outcome == "recovered", result.where
    assert digests(result) == uninterrupted
    assert set(result.ranks) == {"host1:rxe0", "host4:rxe0", "host5:rxe0"}
    assert len(result.restarts) == (1 if phase == "diagnose" else 2)


def test_loss_of_the_storage_during_the_restore_fails_with_the_reason(lab):
    running = driver.start(
        lab, SPEC, Resilience(policy=Policy(), spares=("host5:rxe0",)), losing(lab, "host6", "restore")
    )
    after(running, 60)
    lab.kill("host2")
    result = running.wait(PATIENCE_S)
    assert (result.outcome, len(result.restarts)) == ("failed", 2)
    assert "phase restore" in result.where
    assert "without its storage the job has no checkpoint" in result.where


def test_two_losses_with_one_spare_shrink_the_job_if_configured(lab):
    spec = replace(SPEC, grid=(("dp", 4),), ranks=(*SPEC.ranks, "host4:rxe0"))
    running = started(lab, spec, without_spare="shrink")
    after(running, 50)
    lab.freeze("host1")  # nothing goes on between the two losses
    for host in ("host2", "host3"):
        lab.kill(host)
    lab.thaw("host1")
    result = running.wait(PATIENCE_S)
    assert result.outcome == "recovered", result.where
    assert (result.ranks, result.spec.grid) == (("host1:rxe0", "host4:rxe0"), (("dp", 2),))
    assert [(state.wrong, state.iterations) for state in result.states] == [(0, SPEC.iterations)] * 2
    assert len(digests(result)) == 1


def test_spare_behind_a_link_that_is_down_is_not_preferred(lab):
    """host4 and host6 would be equally good replacements for host2, and host4 is listed first."""
    lab.cut = frozenset(link.name for link in lab.topology.links if link.name == "rtsw2:ctsw1")
    assert lab.cut
    spec = replace(SPEC, storage=replace(SPEC.storage, host="host5"))
    running = started(lab, spec, spares=("host4:rxe0", "host6:rxe0"))
    after(running, 30)
    lab.kill("host2")
    result = running.wait(PATIENCE_S)
    assert (result.outcome, result.ranks) == ("recovered", ("host1:rxe0", "host6:rxe0", "host3:rxe0")), result.where


def test_spare_that_is_lost_before_is_not_used(lab):
    running = started(lab)
    after(running, 10)
    lab.kill("host5")
    after(running, 30)
    lab.kill("host2")
    result = running.wait(PATIENCE_S)
    assert (result.outcome, "0 spares are left" in (result.where or "")) == ("failed", True)


def test_loss_of_the_storage_fails_with_the_reason(lab):
    running = started(lab)
    after(running, 30)
    lab.kill("host6")
    result = running.wait(PATIENCE_S)
    assert result.outcome == "failed"
    assert "without its storage the job has no checkpoint" in result.where


def test_loss_before_the_first_checkpoint_restarts_from_the_beginning(lab, uninterrupted):
    """The first checkpoint is due late, because a busy machine may finish dozens of iterations before the kill."""
    running = started(lab, replace(SPEC, storage=replace(SPEC.storage, every=250)))
    after(running, 3)
    lab.kill("host2")
    result = running.wait(PATIENCE_S)
    assert_right(result, uninterrupted, every=250)
    assert result.restarts[0].restored_iterations == 0


def test_corrupt_checkpoint_is_named_and_the_one_before_is_restored(lab, uninterrupted, tmp_path, monkeypatch):
    monkeypatch.setattr(loss, "SILENT_AFTER_ERROR_NS", 4 * S)
    running = started(lab)
    after(running, 60)
    (folder,) = (path for path in (tmp_path / "checkpoints").iterdir() if path.is_dir())
    lab.freeze("host6")  # no checkpoint is stored during the check
    lab.freeze("host2")
    newest = max(path.name for path in folder.glob("*.checkpoint"))
    path = folder / newest
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    lab.thaw("host6")
    result = running.wait(PATIENCE_S)
    assert result.outcome == "recovered", result.where
    assert digests(result) == uninterrupted
    (restart,) = result.restarts
    assert (newest, "corrupt: checksum mismatch") in restart.rejected
    assert restart.restored_iterations < int(newest[-19:-11])
    assert restart.lost_iterations <= 2 * EVERY


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.slow), "staggered", "async"])
def test_every_checkpoint_mode_restores_a_whole_set(lab, uninterrupted, mode):
    running = started(lab, replace(SPEC, storage=replace(SPEC.storage, mode=mode)))
    after(running, 60)
    lab.kill("host1")
    result = running.wait(PATIENCE_S)
    assert digests(result) == uninterrupted
    (restart,) = result.restarts
    assert restart.restored_iterations >= EVERY
    assert restart.lost_iterations <= EVERY * (1 if mode == "sync" else 2)


def test_restart_without_restoring_the_state_is_detected(lab, uninterrupted):
    """Mutation test: iterations continue from the checkpoint's number but an empty state; each result is correct."""
    running = started(lab, restores=False)
    after(running, 60)
    lab.kill("host2")
    result = running.wait(PATIENCE_S)
    assert (result.outcome, result.wrong_elements) == ("recovered", 0)
    assert digests(result) != uninterrupted
    assert all(state.wrong > 0.9 * state.elements for state in result.states)


def test_job_that_is_stopped_does_not_restart(lab):
    running = started(lab)
    after(running, 20)
    running.stop()
    result = running.wait(30)
    assert result.outcome == "completed"
    assert [state.wrong for state in result.states] == [0, 0, 0]
    assert result.iterations_completed < SPEC.iterations


def test_spare_on_a_host_of_the_job_is_refused(lab):
    with pytest.raises(UsageError, match="host3:rxe1 cannot be a spare"):
        started(lab, spares=("host3:rxe1",))
    assert not any(lab.engines_of(host.name) for host in lab.topology.hosts)


def test_engine_standstill_before_any_task_reports_only_its_clock(lab):
    """The controller measures the clock first, and any other message would be a protocol error."""
    channel = lab.open_module("host1", engine_client.MODULE)
    channel.send({"do": "clock"})
    assert channel.receive(timeout_s=30)["event"] == "clock"
    lab.freeze("host1")
    wait_s(0.8)  # an engine with tasks would report this standstill
    lab.thaw("host1")
    wait_s(0.3)
    channel.send({"do": "clock"})
    assert channel.receive(timeout_s=30)["event"] == "clock"


def nothing_runs_on(lab):
    return not any(lab.engines_of(host.name) for host in lab.topology.hosts)


def test_job_that_its_user_abandons_ends_at_once(lab):
    with pytest.raises(KeyboardInterrupt), started(lab, replace(SPEC, iterations=100_000)) as running:
        after(running, 5)
        raise KeyboardInterrupt
    assert running.is_over
    assert (running.outcome, running.failure, running.restarts) == ("failed", "abandoned by its user", [])
    until(lambda: nothing_runs_on(lab))


def test_job_that_waits_for_a_lost_host_ends_at_the_timeout(lab):
    running = started(lab, restart="same", spares=())
    after(running, 20)
    lab.kill("host1")
    in_phase(running, "initialise")
    with pytest.raises(LabError, match="not over after 1 s"):
        running.wait(1)
    assert running.is_over
    assert (running.outcome, running.failure) == ("failed", "not over after 1 s")
    until(lambda: nothing_runs_on(lab))


def test_loss_while_warming_up_does_not_keep_the_caller_until_the_job_is_over(lab):
    events = []

    def note(event):
        events.append(event["event"])
        if event["event"] == "qps" and events.count("qps") == 1:
            threading.Timer(0.3, lab.kill, ["host2"]).start()

    running = driver.start(
        lab, replace(SPEC, warmup=1000), Resilience(policy=Policy(), spares=("host5:rxe0",)), on_event=note
    )
    assert (running.is_over, running.job.generation, events.count("ready")) == (False, 1, 1)
    result = running.wait(PATIENCE_S)
    assert (result.outcome, result.restarts[0].restored_iterations) == ("recovered", 0), result.where
    assert [state.wrong for state in result.states] == [0, 0, 0]
    assert events.count("ready") == 1


def test_error_of_a_connection_to_the_lost_host_during_the_diagnosis_begins_no_second_restart(lab, uninterrupted):
    """The connection manager answers it at both ends, of which one is gone. On a busy machine it comes that late."""
    reported = []

    def report_late(event):
        if event["event"] == "restart" and event["phase"] == "diagnose":
            until(lambda: not lab.engines_of("host2"))
            one = next(one for one in running.connections if one.src == "host2:rxe0")
            task = running.plan.connections[one.index].dst
            message = {"event": "qp_error", "task": task, "conn": one.index, "generation": one.generation}
            message |= {"at_ns": time.monotonic_ns(), "qpn": one.rqpn, "status": "RETRY_EXC_ERR"}
            running._engines.events.put(engine_client.Event(host=one.dst.partition(":")[0], message=message))
            reported.append(one)
            for host in ("host1", "host3"):
                lab.thaw(host)

    running = driver.start(lab, SPEC, Resilience(policy=Policy(), spares=("host5:rxe0",)), report_late)
    after(running, 50)
    for host in ("host1", "host3"):  # they report nothing before the diagnosis
        lab.freeze(host)
    lab.kill("host2")
    assert_right(running.wait(PATIENCE_S), uninterrupted)
    assert len(reported) == 1


@pytest.mark.parametrize("is_first", [True, False])
def test_wrong_results_while_warming_up_fail_the_job_and_are_no_loss(lab, is_first):
    """A restart used to hide wrong results of the first warm-up, and later warm-ups were not checked."""
    spoil, warmup = lab.folder / "spoil", 300

    def note(event):
        if event["event"] == ("qps" if is_first else "restart"):
            spoil.touch()
        if event["event"] == ("restart" if is_first else "iteration"):
            spoil.unlink(missing_ok=True)

    spec = replace(SPEC, warmup=warmup, storage=replace(SPEC.storage, every=250))
    running = driver.start(lab, spec, Resilience(policy=Policy(), spares=("host5:rxe0",)), on_event=note)
    if not is_first:
        after(running, 1)
        lab.kill("host2")
    result = running.wait(PATIENCE_S)
    assert result.outcome == "failed"
    assert "wrong elements in the warm-up" in result.where
    assert result.wrong_elements > 0
    assert len(result.restarts) == (0 if is_first else 1)


def test_loss_after_the_last_checkpoint_executes_no_further_iteration(lab, uninterrupted, tmp_path, monkeypatch):
    handle_done = driver.ElasticRunning._on_done

    def lose_a_rank(running, message, host, now_ns):
        handle_done(running, message, host, now_ns)
        if not running.restarts:
            until(lambda: len(list(tmp_path.glob(f"*/*/g0-rank*-after{SPEC.iterations:08d}.checkpoint"))) == 3)
            lab.kill("host2")
            running.failure = "host2 was lost"

    monkeypatch.setattr(driver.ElasticRunning, "_on_done", lose_a_rank)
    result = started(lab).wait(PATIENCE_S)
    # The storage has a rank's last checkpoint before its engine records that iteration, or is killed.
    assert_right(result, uninterrupted, last=SPEC.iterations - 2)
    (restart,) = result.restarts
    assert (restart.restored_iterations, restart.lost_iterations) == (SPEC.iterations, 0)
    assert {state.iterations for state in result.states} == {SPEC.iterations}


def test_job_that_cannot_restart_has_the_flight_recorders_of_the_ranks_that_are_left(lab):
    running = started(lab)
    after(running, 30)
    for host in ("host1", "host2"):
        lab.kill(host)
    result = running.wait(PATIENCE_S)
    assert (result.outcome, "1 spares are left" in result.where) == ("failed", True)
    assert [flight.endpoint for flight in result.flights] == ["host3:rxe0"]
    assert [event.message for event in running.events if event.name == "error"] == []


@pytest.fixture
def interruptible():
    """Make SIGINT raise KeyboardInterrupt even if the tests run in the background, where SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_job_whose_start_is_interrupted_starts_no_further_engine(lab):
    def interrupt(event):
        if event["event"] == "qps":
            threading.Timer(0.3, _thread.interrupt_main).start()

    with pytest.raises(KeyboardInterrupt):
        driver.start(
            lab, replace(SPEC, warmup=100_000), Resilience(policy=Policy(restart="same"), rejoin_s=20), interrupt
        )
    until(lambda: not any(one.name == "traffic: job of 3 ranks" for one in threading.enumerate()))
    assert {host: len(processes) for host, processes in lab.processes.items()} == {
        "host1": 1, "host2": 1, "host3": 1, "host6": 1,
    }  # fmt: skip
    until(lambda: nothing_runs_on(lab))


def test_engines_that_are_closed_start_no_further_one(lab):
    engines = engine_client.Engines.start(lab, ["host1"])
    engines.close()
    with pytest.raises(LabError, match="host2: no traffic engine is started, because"):
        engines.add(lab, ["host2"])
    assert "host2" not in lab.processes
    until(lambda: nothing_runs_on(lab))


def test_message_of_an_engine_that_was_given_up_is_discarded():
    """The message arrives while the reader thread already waits for it."""
    engines = engine_client.Engines()

    class Channel:
        def receive(self, *, timeout_s):
            del timeout_s
            engines.drop("host1")
            return {"event": "iteration"}

        def close(self):
            pass

    engines._channels["host1"], engines.offsets["host1"] = Channel(), ClockOffset(offset_ns=0, error_ns=0)
    engines._pump("host1")
    assert (engines.events.empty(), engines.heard_ns) == (True, {})


def test_message_sent_before_a_ping_does_not_answer_it():
    """An engine that was just killed counts as lost, although its last messages are still being read."""
    engines, answers = engine_client.Engines(), []

    class Channel:
        def send(self, message):
            replies.append({"event": "clock", "monotonic_ns": 1, "pid": 1, "seq": message["seq"]})

        def receive(self, *, timeout_s):
            del timeout_s
            answers.append(dict(engines.answered))
            return replies.pop(0) if replies else None

    replies = [{"event": "iteration"}]
    engines._channels["host1"], engines.offsets["host1"] = Channel(), ClockOffset(offset_ns=0, error_ns=0)
    numbers = [engines.ping("host1"), engines.ping("host1")]
    engines._pump("host1")
    assert answers == [{}, {}, {"host1": numbers[0]}, {"host1": numbers[1]}]
    assert engines.ping("host2") > numbers[1] > numbers[0] > 0


def test_ranks_that_share_a_host_are_refused_before_anything_is_started(lab):
    with pytest.raises(UsageError, match="is inside one host"):
        started(lab, replace(SPEC, ranks=("host1:rxe0", "host1:rxe1", "host2:rxe0")))
    assert lab.processes == {}


@pytest.mark.parametrize("clock_error_ns", [0, S // 5])
def test_job_that_shrinks_has_the_state_of_both_sizes_and_the_checkpoints_of_its_lineage(
    lab, monkeypatch, clock_error_ns
):
    """A clock that is measured on a busy machine is wrong by tens of ms; the warm-up here takes less than ten."""
    monkeypatch.setattr(engine_client.clock, "measure", late_by(clock_error_ns))
    published = []
    running = started(lab, restart="shrink", spares=(), on_event=published.append)
    after(running, 70)
    lab.kill("host2")
    result = running.wait(PATIENCE_S)
    assert (result.outcome, result.ranks) == ("recovered", ("host1:rxe0", "host3:rxe0")), result.where
    assert result.spec.grid == (("dp", 2),)
    assert [(state.wrong, state.iterations) for state in result.states] == [(0, SPEC.iterations)] * 2
    assert result.iterations_completed == SPEC.iterations
    host_of = {event.message["start_ns"]: event.host for event in running.events if event.name == "stored"}
    hosts = {
        rank: {host_of[checkpoint.start_ns] for checkpoint in result.checkpoints if checkpoint.rank == rank}
        for rank in (0, 1)
    }
    assert hosts == {0: {"host1"}, 1: {"host3"}}
    (restart,) = result.restarts
    before = [
        checkpoint.iteration
        for checkpoint in result.checkpoints
        if checkpoint.rank == 1 and checkpoint.end_ns < restart.noticed_ns + max(result.clock_error_ns.values())
    ]
    assert before[:3] == [19, 39, 59]
    ready = [event["time_ns"] for event in published if event["event"] == "ready"]
    assert [running.started_ns] == ready, "the window begins when all ranks have warmed up"
    assert running.started_ns == result.window.start_ns < restart.progress_ns < result.window.end_ns
    assert running.job.phase == "finished"


def test_stopped_job_does_not_restart_after_the_loss_of_a_rank(lab):
    running = started(lab)
    after(running, 20)
    lab.freeze("host2")  # so that the job is still running at the loss
    running.stop()
    lab.kill("host2")
    result = running.wait(PATIENCE_S)
    assert (result.outcome, result.restarts, result.ranks) == ("failed", (), SPEC.ranks)
    assert result.where.startswith("host2: ")
    assert running.job.phase == "failed"
