"""Jobs with real engines that lose hosts at random never hang, and never pass with a wrong state.

A loss has a moment (after some iterations, or in a phase of a restart), a host (of a rank, a spare or the storage) and
an event. The verdict comes from the product (`faultbed.harness.judge`).
"""

from __future__ import annotations

import hashlib
import random
import threading
from dataclasses import dataclass

import pytest
from local_traffic import LocalLab
from synthetic_run import run_of
from waiting import until

from faultbed.harness import judge
from faultbed.harness.analysis.observe import observe
from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.experiment.metrics import METRICS
from faultbed.harness.experiment.run_plan import Plan
from faultbed.harness.parts.part import Planned
from faultbed.harness.record.workload_series import ranks_of, resilience_of, series_of
from faultbed.harness.verdict import Verdict
from faultbed.traffic.node.ranks.rank_state import expected
from faultbed.traffic.workloads import job
from faultbed.traffic.workloads.elastic import driver, loss
from faultbed.traffic.workloads.elastic.machine import Policy
from faultbed.traffic.workloads.elastic.resilience import Resilience
from faultbed.traffic.workloads.job import JobPhase, JobSpec
from faultbed.traffic.workloads.storage_service import Storage

S = 1_000_000_000
PATIENCE_S = 240.0
CASES, QUICK = 72, 1
"""Number of jobs, which are to lose 136 hosts if none is over before, and how many of them run by default."""
HOSTS = ("host1", "host2", "host3", "host4", "host5")
STORAGE = "host6"
PHASES = ("diagnose", "reschedule", "initialise", "restore", "catch_up")
HOWS = ("process", "host", "freeze", "pause")
SPEC = JobSpec(
    grid=(("dp", 3),),
    phases=(JobPhase(along="dp", collective="all-reduce", size_bytes=1 << 14),),
    ranks=("host1:rxe0", "host2:rxe0", "host3:rxe0"),
    iterations=200,
    warmup=1,
    storage=Storage(host=STORAGE, checkpoint_bytes=1 << 15, every=20),
    peer_deadline_s=PATIENCE_S,  # a busy machine is no loss
    op_deadline_s=PATIENCE_S,
)
WORKLOAD = {
    "grid": [["dp", 3]],
    "phases": [{"along": "dp", "collective": "all-reduce", "size_bytes": 1 << 14, "algorithm": "auto"}],
    "iterations": SPEC.iterations,
    "storage": {"host": STORAGE, "every": SPEC.storage.every},
}
POLICIES = (
    Policy(restart="spare", without_spare="fail"),
    Policy(restart="spare", without_spare="shrink"),
    Policy(restart="shrink"),
    Policy(restart="same"),
)


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The loss of one host: its engine or the whole host ends or stands still, for good or for `for_s`.

    With `for_s`, a host that ended comes back after that time.
    """

    moment: int | str
    host: str
    how: str
    for_s: float | None


def drawn(seed):
    """Draw a policy and one to three losses."""
    chance = random.Random(f"losses {seed}")
    policy = POLICIES[seed % len(POLICIES)]
    losses = []
    for number in range(chance.randint(1, 3)):
        in_phase = number and chance.random() < 0.6  # before the first loss there is no restart
        how = chance.choice(HOWS)
        losses.append(
            Loss(
                moment=chance.choice(PHASES) if in_phase else chance.randrange(1, SPEC.iterations),
                host=STORAGE if chance.random() < 0.15 else chance.choice(HOSTS),
                how=how,
                for_s=chance.uniform(0.2, 8.0) if how == "pause" or chance.random() < 0.5 else None,
            )
        )
    return policy, losses


def arrives(running, moment):
    """Wait until a job reaches a moment; return whether it did before its end."""

    def is_there():
        return running.job.phase == moment if isinstance(moment, str) else running.job.finished >= moment

    until(lambda: is_there() or running.is_over, within_s=PATIENCE_S, every_s=0.001)
    return not running.is_over


def inflict(lab, one):
    if one.how in ("freeze", "pause"):
        lab.freeze(one.host)
        back = lab.thaw
    else:
        lab.kill(one.host, is_dead=one.how == "host")
        back = lab.revive if one.how == "host" else None
    if one.for_s is None or back is None:
        return None
    timer = threading.Timer(one.for_s, back, [one.host])
    timer.start()
    return timer


def verdict_of(lab, result):
    run = run_of(
        lab=lab.name,
        lab_kind="soft",
        accelerator=None,
        topology=lab.topology,
        t0_ns=result.window.start_ns,
        end_ns=result.window.end_ns,
        workload=WORKLOAD,
        ranks=ranks_of(result),
        series=series_of(result),
        resilience=resilience_of(result),
        lab_state="CLEAN",
        failure=result.where if result.outcome == "failed" else None,
    )
    expectation = Expectation(metric=METRICS["state_errors"], equals=0)
    plan = Plan(faultbed="0", experiment="losses", seed=1, inventory="x", workload=WORKLOAD, faults=())
    return judge.judge(before=Planned(plan=plan, expectations=[expectation]), run=run, observed=observe(run)).verdict


def state_without_a_loss(lab):
    """Return the digest of the final state of all ranks, by the closed form."""
    program = job.fit(lab, SPEC)[1][0]
    part = {name: program[name] for name in ("ranks", "results", "groups")}
    words = expected([part | {"first": SPEC.warmup, "iterations": SPEC.iterations}], SPEC.dtype, SPEC.redop)
    return hashlib.sha256(words.tobytes()).hexdigest()


@pytest.fixture
def lab(tmp_path, monkeypatch):
    plain, folder = driver.storage.serve, str(tmp_path / "checkpoints")
    monkeypatch.setattr(driver.storage, "serve", lambda *args, **options: plain(*args, **options, folder=folder))
    monkeypatch.setattr(loss, "SILENT_AFTER_ERROR_NS", 4 * S)
    made = LocalLab(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] if seed >= QUICK else []) for seed in range(CASES)]
)
def test_job_that_loses_hosts_at_random_ends_with_the_right_state_or_the_reason(lab, record_property, seed):
    policy, losses = drawn(seed)
    spares = ("host4:rxe0", "host5:rxe0") if policy.restart == "spare" else ()
    running = driver.start(lab, SPEC, Resilience(policy=policy, spares=spares, rejoin_s=10))
    inflicted, timers = 0, []
    with running:
        for one in losses:
            if not arrives(running, one.moment):
                break
            timers.append(inflict(lab, one))
            inflicted += 1
        result = running.wait(PATIENCE_S)
    for timer in timers:
        if timer is not None:
            timer.cancel()
    verdict = verdict_of(lab, result)
    for name, value in (("losses", inflicted), ("verdict", verdict.verdict.value), ("where", result.where)):
        record_property(name, value)
    by_name = {check.name: check.verdict for check in verdict.checks}
    about = f"{policy} {losses}: {verdict}"
    assert verdict.verdict is not Verdict.ERROR, about
    if result.outcome == "failed":
        assert result.where, about
        assert verdict.verdict is Verdict.FAIL, about
    else:
        assert by_name["state"] is Verdict.PASS, about
        assert {state.iterations for state in result.states} == {SPEC.iterations}, about
        digests = {state.sha256 for state in result.states}
        assert len(digests) == 1, about
        assert len(result.ranks) < len(SPEC.ranks) or digests == {state_without_a_loss(lab)}, about
    assert all(
        restart.lost_iterations is None or restart.lost_iterations <= SPEC.storage.every for restart in result.restarts
    )


def test_hundred_losses_are_drawn_of_every_sort():
    losses = [one for seed in range(CASES) for one in drawn(seed)[1]]
    assert len(losses) >= 100
    assert {loss.how for loss in losses} == set(HOWS)
    assert {loss.host for loss in losses} == {*HOSTS, STORAGE}
    assert {loss.moment for loss in losses if isinstance(loss.moment, str)} == set(PHASES)
