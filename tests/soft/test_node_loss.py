"""A job on a real lab survives the loss of a host, with the final state of a job that was never interrupted."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from faultbed.harness.analysis.observe import observe
from faultbed.harness.experiment import toml_text
from faultbed.harness.experiment.experiment_file import decode
from faultbed.harness.experiment.workload_specs import job_spec
from faultbed.harness.run import loop as run
from faultbed.harness.verdict import Verdict
from faultbed.inject.profiles import schedule
from faultbed.testbed.inventory.subset import without_hosts
from faultbed.traffic.node.ranks.rank_state import expected
from faultbed.traffic.workloads import job

pytestmark = [pytest.mark.soft, pytest.mark.slow, pytest.mark.needs("hosts >= 4")]

REBOOT = (Path(__file__).parents[1] / "experiments" / "node-loss.toml").read_text()
QUIET = REBOOT[: REBOOT.index("[[faults]]")] + '[[expect]]\nmetric = "state_errors"\nequals = 0\n'
KILLED = REBOOT.replace("host.reboot", "host.rank-kill")
HOWS = pytest.mark.parametrize("text", [REBOOT, KILLED], ids=["reboot", "rank-kill"])


def restarting(text, how):
    """Return the experiment without its spare: the job restarts on the same hosts, or on fewer."""
    without = text.replace('spares = ["host4:rxe0"]\n', "").replace('restart = "spare"', f'restart = "{how}"')
    assert "host4:rxe0" not in without
    assert f'restart = "{how}"' in without
    return without


def finished(text, lab, tmp_path, *, restores=True):
    source = text.encode()
    resolved = run.resolve(decode(source, source="here.toml"), source, lab.inventory_model)
    job = resolved.experiment.workload
    if not restores:
        job = replace(job, resilience=replace(job.resilience, restores=False))
        resolved = replace(resolved, experiment=replace(resolved.experiment, workload=job))
    done = run.execute(resolved, lab.inventory_model, out=tmp_path, progress=print)
    lab.forget_connections()
    measured = done.run_dir.read_run()
    for timed in observe(measured).restarts:
        print(timed.describe())
    print(observe(measured).metrics["ettr"])
    return done.verdict, measured


@pytest.fixture(scope="module")
def uninterrupted():
    """Return the digests of the states of an uninterrupted run of an experiment; each experiment is run once."""
    return {}


def states_of(measured):
    return [(state.rank, state.iterations, state.wrong, state.sha256) for state in measured.workload.resilience.states]


def states_without_a_loss(uninterrupted, lab, tmp_path):
    if not uninterrupted:
        verdict, quiet = finished(QUIET, lab, tmp_path)
        assert (verdict.verdict, quiet.resilience.restarts) == (Verdict.PASS, ())
        uninterrupted["states"] = states_of(quiet)
    return uninterrupted["states"]


@HOWS
def test_job_that_loses_a_host_ends_in_the_state_of_an_uninterrupted_one(lab, tmp_path, uninterrupted, text):
    quiet = states_without_a_loss(uninterrupted, lab, tmp_path)
    verdict, measured = finished(text, lab, tmp_path)
    assert verdict.verdict is Verdict.PASS, verdict
    (restart,) = measured.workload.resilience.restarts
    assert restart.after == ("host1:rxe0", "host2:rxe0", "host4:rxe0")
    assert restart.lost_iterations <= 10
    assert states_of(measured) == quiet


@HOWS
def test_job_that_waits_for_its_host_ends_in_the_uninterrupted_state(lab, tmp_path, uninterrupted, text):
    quiet = states_without_a_loss(uninterrupted, lab, tmp_path)
    text = restarting(text, "same").replace('max = "90s"', 'max = "300s"')  # a host boots and is provisioned meanwhile
    verdict, measured = finished(text, lab, tmp_path)
    assert verdict.verdict is Verdict.PASS, verdict
    (restart,) = measured.workload.resilience.restarts
    assert restart.after == ("host1:rxe0", "host2:rxe0", "host3:rxe0")
    assert restart.lost_iterations <= 10
    assert states_of(measured) == quiet


def state_of_both_sizes(text, lab, restored):
    """Return the digest of the state after `restored` iterations on three ranks and the others on two."""
    spec = job_spec(decode(text.encode(), source="here.toml").workload)
    parts = []
    for size, first, iterations in ((3, 0, restored), (2, restored, spec.iterations - restored)):
        ranks = replace(spec, grid=(("dp", size),), ranks=spec.ranks[:size])
        program = job.fit(lab, ranks)[1][0]
        parts.append(
            {
                "ranks": size,
                "results": program["results"],
                "groups": program["groups"],
                "first": spec.warmup + first,
                "iterations": iterations,
            }
        )
    return hashlib.sha256(expected(parts, spec.dtype, spec.redop).tobytes()).hexdigest()


@HOWS
def test_job_that_shrinks_ends_in_the_state_of_both_sizes(lab, tmp_path, text):
    text = restarting(text, "shrink")
    verdict, measured = finished(text, lab, tmp_path)
    assert verdict.verdict is Verdict.PASS, verdict
    (restart,) = measured.workload.resilience.restarts
    assert restart.after == ("host1:rxe0", "host2:rxe0")
    assert restart.lost_iterations <= 10
    assert 0 < restart.restored_iterations < 120
    digest = state_of_both_sizes(text, lab, restart.restored_iterations)
    assert states_of(measured) == [(0, 120, 0, digest), (1, 120, 0, digest)]


def test_job_goes_on_through_the_interruptions_of_a_published_run(lab, tmp_path):
    """Two minutes with the causes of 54 days of a published training run: engines are killed, hosts reboot, links fail.

    host4 has the storage and is never lost. If a host is lost a second time before it is back, that fault has no effect
    and is not proved. The verdict may then be INCONCLUSIVE, but the state must be that of a job without interruptions.
    """
    ranks = without_hosts(lab.inventory_model, ["host4"]).topology
    specs = schedule("llama3-54d-fatal", ranks, seed=11, duration_s=120, events=5)
    faults = "".join(
        f'[[faults]]\nkind = "{spec.kind}"\ntarget = "{spec.target}"\n'
        f'at = "{8 + spec.at_s:.3f}s"\nfor = "{spec.for_s}s"\n'
        f"set = {toml_text.inline(dict(spec.params))}\n"
        for spec in specs
    )
    print(faults)
    text = restarting(QUIET, "same").replace("iterations = 120", "iterations = 1800")
    verdict, measured = finished(text.replace("[[expect]]", faults + "[[expect]]", 1), lab, tmp_path)
    checks = {check.name: check for check in verdict.checks}
    assert checks["state_errors"].verdict is Verdict.PASS, checks
    assert verdict.verdict in (Verdict.PASS, Verdict.INCONCLUSIVE), checks
    assert measured.workload.resilience.restarts
    assert max(restart.lost_iterations or 0 for restart in measured.workload.resilience.restarts) <= 10


def test_restart_that_restores_nothing_is_no_pass(lab, tmp_path):
    """Mutation test: the ranks continue from the number of the checkpoint, but with an empty state."""
    verdict, measured = finished(KILLED, lab, tmp_path, restores=False)
    assert verdict.verdict is Verdict.FAIL
    assert {check.name for check in verdict.checks if check.verdict is Verdict.FAIL} == {"state", "state_errors"}
    assert measured.workload.resilience.restarts
