"""Experiments whose workload is a job: faults of its own programs, and its metrics besides goodput."""

from __future__ import annotations

import pytest

from faultbed.harness.experiment.experiment_file import decode
from faultbed.harness.run import loop as run
from faultbed.harness.verdict import Verdict

pytestmark = [pytest.mark.soft, pytest.mark.slow, pytest.mark.needs("hosts >= 4")]

PROGRAMS = """
name = "programs"
seed = 1

[workload]
grid = "dp=4"
phases = ["dp:all-reduce:64KiB"]
iterations = 150
qp = { timeout = 18 }

[workload.storage]
host = "host4"
ingest = "64KiB"
checkpoint = "512KiB:10:async"

[[faults]]
kind = "storage.stall"
target = "host4"
at = "8s"
for = "3s"

[[faults]]
kind = "host.rank-hang"
target = "host2"
at = "16s"
for = "2s"

[[expect]]
metric = "ingest.wait"
max = "30s"
"""


SERVING = """
name = "serving"
seed = 1

[workload]
requests = 16
tokens = 6
prefill = "256KiB"
decode = "16KiB"
slo_ttft = "60s"

[[faults]]
kind = "link.rate"
target = "host3:rxe0"
at = "4s"
for = "3s"
set = { rate = "2Mb/s" }

[[expect]]
metric = "ttft.p50"
max = "60s"

[[expect]]
metric = "slo_attainment"
min = 1

[[expect]]
metric = "iterations"
min = 16

[[expect]]
metric = "wrong_elements"
max = 0
"""

RANKING = """
name = "ranking"
seed = 1

[workload]
embedding = "256KiB"
dense = "64KiB"
iterations = 15

[[expect]]
metric = "iterations"
min = 15

[[expect]]
metric = "wrong_elements"
max = 0
"""


SLOW_RANK = """
name = "slow-rank"
seed = 1

[workload]
collective = "all-reduce"
size = "64KiB"
duration = "60s"
compute_units = 10

[[faults]]
kind = "gpu.throttle"
target = "host2:gpu0"
at = "30s"
for = "25s"
set = { percent = 75 }

[[stop]]
metric = "slow_ranks"
max = 0
"""


def finished(text, lab, tmp_path, *, verdict=Verdict.PASS, progress=print):
    source = text.encode()
    resolved = run.resolve(decode(source, source="here.toml"), source, lab.inventory_model)
    done = run.execute(resolved, lab.inventory_model, out=tmp_path, progress=progress)
    lab.forget_connections()
    assert done.verdict.verdict is verdict, done.verdict
    return done


def test_experiment_may_stop_processes_its_own_workload_starts(lab, tmp_path):
    """When the faults are prepared, neither the storage service nor the ranks run yet.

    Attribution names both causes.
    """
    done = finished(PROGRAMS, lab, tmp_path)
    assert [receipt.kind for receipt in done.verdict.faults] == ["storage.stall", "host.rank-hang"]
    actual = {(one.cause, one.name) for one in done.verdict.attribution}
    assert actual >= {("slow-storage", "host4"), ("hung-rank", "host2")}, done.verdict.attribution


@pytest.mark.parametrize("text", [SERVING, RANKING], ids=["inference", "ranking"])
def test_inference_job_is_judged_by_ttft_and_tpot(lab, tmp_path, text):
    done = finished(text, lab, tmp_path)
    page = done.report.read_text(encoding="utf-8")
    assert ("time to first token" in page) is (text is SERVING)
    assert all(receipt.cleared.ok for receipt in done.verdict.faults)


def test_slow_rank_is_reported_during_the_run_and_stops_it(lab, tmp_path):
    """The slow rank is reported once, within the window; the stop condition lifts the fault and its receipt is
    complete.
    """
    messages = []
    done = finished(SLOW_RANK, lab, tmp_path, verdict=Verdict.FAIL, progress=messages.append)
    (named,) = [line for line in messages if "computes about" in line]
    assert named.startswith("rank 1 (host2:rxe0) "), named
    assert messages.index(named) < next(at for at, line in enumerate(messages) if "cleared" in line)
    (receipt,) = done.verdict.faults
    assert receipt.fired.count > 0
    assert receipt.cleared.ok
    failed = [check.name for check in done.verdict.checks if check.verdict is Verdict.FAIL]
    assert failed == ["stop.slow_ranks"]
