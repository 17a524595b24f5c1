"""Experiments whose workload is a job: what its own programs can suffer, and what it measures besides goodput."""

from __future__ import annotations

import pytest

from harness.experiment.file import decode
from harness.run import loop as run
from harness.verdict import Verdict

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
set = { rate = 2 }

[[expect]]
metric = "ttft.p99"
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


def finished(text, lab, tmp_path):
    source = text.encode()
    decided = run.decide(decode(source, source="here.toml"), source, lab.inventory_model)
    done = run.execute(decided, lab.inventory_model, out=tmp_path, progress=print)
    lab.forget_connections()
    assert done.verdict.verdict is Verdict.PASS, done.verdict
    return done


def test_an_experiment_may_stop_what_its_own_workload_starts(lab, tmp_path):
    """When the faults are prepared, neither the storage nor the ranks are there yet. Blind, both are named."""
    done = finished(PROGRAMS, lab, tmp_path)
    assert [receipt.kind for receipt in done.verdict.faults] == ["storage.stall", "host.rank-hang"]
    found = {(one.cause, one.name) for one in done.verdict.attribution}
    assert found >= {("slow-storage", "host4"), ("hung-rank", "host2")}, done.verdict.attribution


@pytest.mark.parametrize("text", [SERVING, RANKING], ids=["inference", "ranking"])
def test_a_job_that_serves_is_judged_with_its_own_times(lab, tmp_path, text):
    done = finished(text, lab, tmp_path)
    page = done.report.read_text(encoding="utf-8")
    assert ("time to first token" in page) is (text is SERVING)
    assert all(receipt.cleared["ok"] for receipt in done.verdict.faults)
