"""Workers as jobs of a real Slurm on this machine: two nodes, one controller, munge. `make nightly` installs them."""

import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import cloudpickle
import pytest
import slurm_cluster
from house import HOUSE
from synthetic_sweep import DEMO, OVER, SOFT

from faultbed.harness.record import code
from faultbed.harness.run.workers.worker_places import parse_place, with_options
from faultbed.testbed.errors import UsageError

open_pool = pytest.importorskip("faultbed.harness.run.workers.open_pool", reason="needs the extra scale")
from faultbed.harness.run.workers.slurm_workers import SlurmWorkers  # noqa: E402 - after the check for its package

pytestmark = [pytest.mark.slow, pytest.mark.process]
cloudpickle.register_pickle_by_value(sys.modules[__name__])
needs_slurm = pytest.mark.skipif(bool(slurm_cluster.missing()), reason="Slurm is not installed; `make nightly` does so")


@pytest.fixture(scope="module")
def conf(tmp_path_factory):
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture
def slurm(conf, monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_CONF", str(conf))
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DASK_JOBQUEUE__SLURM__MEMORY", "512MiB")
    settings = {"jobqueue.slurm.memory": "512MiB", "jobqueue.slurm.job-cpu": 1}
    with open_pool.dask.config.set(settings):
        yield SimpleNamespace(lines=[], runs=tmp_path / "runs")


def opened(slurm, partition="lab", count=2):
    return open_pool.open_pool(
        with_options(parse_place(f"slurm:{partition}"), count, None), inventory=None, runs=slurm.runs,
        progress=slurm.lines.append,
    )  # fmt: skip


@needs_slurm
def test_six_points_on_two_nodes_and_no_job_is_left(slurm):
    def asleep(number):
        time.sleep(0.5)
        return number, os.environ["SLURMD_NODENAME"], os.environ["FAULTBED_HOME"]

    with opened(slurm) as pool:
        results = [result for _, result in pool.map(asleep, range(6))]
        jobs = [worker.number for worker in pool.workers]
        keys = list(slurm.runs.rglob("key.pem"))
        assert [path.stat().st_mode & 0o777 for path in keys] == [0o600]
    assert sorted(number for number, *_ in results) == list(range(6))
    assert len(jobs) == 2
    queued = subprocess.run(["squeue", "-h"], capture_output=True, text=True, check=True).stdout
    assert queued == ""
    assert list(slurm.runs.iterdir()) == [], "certificate and logs go with the command"


@needs_slurm
def test_worker_whose_job_is_killed_is_replaced_and_its_task_made_again(slurm, tmp_path):
    began = tmp_path / "began"

    def once_killed(number):
        if not began.exists():
            began.touch()
            os.kill(os.getpid(), 9)
        return number

    with opened(slurm, count=1) as pool:
        assert sorted(result for _, result in pool.map(once_killed, [1, 2])) == [1, 2]
    assert any("its run is repeated" in line for line in slurm.lines)


@needs_slurm
def test_partition_that_does_not_exist_is_refused_before_a_job_is_submitted(slurm):
    with (
        pytest.raises(UsageError, match=r"--on slurm:other: Slurm refuses such a job: .*partition"),
        opened(slurm, "other"),
    ):
        pass
    assert subprocess.run(["squeue", "-h"], capture_output=True, text=True, check=True).stdout == ""


@needs_slurm
def test_worker_with_other_sources_refuses_and_ends_the_sweep(slurm, monkeypatch):
    monkeypatch.setattr(open_pool.code, "digest", lambda: "0" * 16)
    with (
        pytest.raises(UsageError, match="has other sources than the command that started this worker"),
        opened(slurm, count=1) as pool,
    ):
        list(pool.map(abs, [1]))


@needs_slurm
def test_job_array_of_shards_makes_every_point_once(slurm, tmp_path):
    """The page's job array, with the plan of each shard in place of its runs, which need a lab."""
    script = tmp_path / "sweep.sbatch"
    lines = ["#!/bin/sh", "#SBATCH --array=1-3", "#SBATCH --mem=512M", f"#SBATCH --output={tmp_path}/shard-%a.json"]
    command = f"{sys.executable} -m faultbed.harness.console sweep {DEMO} --over '{OVER}' --repeat 2 --plan --json"
    shard = '--shard "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT"'
    script.write_text("\n".join([*lines, f"cd {HOUSE} && exec {command} --out {tmp_path}/out {shard}", ""]))
    subprocess.run(["sbatch", "--wait", str(script)], check=True, timeout=600)
    counts = [
        [int(left) for left in re.findall(r'"left": ?(\d+)', (tmp_path / f"shard-{number}.json").read_text())]
        for number in (1, 2, 3)
    ]
    assert [sum(count) for count in counts] == [2, 2, 2]
    assert [sum(point) for point in zip(*counts, strict=True)] == [2, 2, 2]


def test_slurm_that_is_not_installed_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="there is no sbatch on this machine"):
        SlurmWorkers("lab", 2, inventory=SOFT.path, folder=tmp_path, code=code.digest(), host="127.0.0.1")
