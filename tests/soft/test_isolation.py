"""A bystander next to a job: faults off its path do not affect it, and its metrics show faults on its path.

`pytest -m "" --lab soft tests/soft/test_isolation.py -s` prints the effect of each group of kinds.
"""

from __future__ import annotations

import pytest

from faultbed.harness.experiment import experiment_file
from faultbed.harness.run import loop
from faultbed.harness.verdict import Verdict
from faultbed.inject.kinds.catalogue import CATALOGUE

pytestmark = [pytest.mark.soft, pytest.mark.slow, pytest.mark.needs("hosts >= 4", "uplinks >= 2")]

TEXT = """
name = "isolation"
[workload]
collective = "all-reduce"
algorithm = "ring"
size = "256KiB"
compute_units = 5
ranks = ["host1:rxe0", "host2:rxe0", "host3:rxe0", "host4:rxe0"]
duration = "64s"
[workload.qp]
timeout = 18
[bystander]
src = "host2:rxe1"
dst = "host4:rxe1"
size = "16KiB"
rate = "4Mb/s"
qp = { timeout = 18 }
[[expect]]
metric = "bystander.goodput_ratio"
min = 0.8
[[expect]]
metric = "bystander.gap"
max = "1s"
[[expect]]
metric = "bystander.qp_errors"
max = 0
"""
FAULT = """
[[faults]]
kind = "{kind}"
target = "{target}"
at = "{at}s"
for = "4s"
set = {{ {parameters} }}
"""
ONE, GPU = "host1:rxe0", "host1:gpu0"
GROUPS = (
    (("packet.drop", ONE, "share = 0.1"), ("packet.delay", ONE, 'delay = "20ms"'), ("link.down", ONE, ""),
     ("gpu.throttle", GPU, "percent = 50")),
    (("packet.corrupt", ONE, "share = 0.1"), ("packet.duplicate", ONE, ""), ("link.flap", ONE, 'period = "1s"'),
     ("gpu.noisy-neighbour", GPU, "")),
    (("packet.reorder", ONE, 'share = 0.1, direction = "from"'), ("link.rate", ONE, 'rate = "5Mb/s"'),
     ("link.oneway", ONE, ""), ("congestion.shallow-queue", ONE, 'packets = 3, rate = "5Mb/s"')),
)  # fmt: skip


def run(lab, tmp_path, faults, **options):
    first = 10
    text = TEXT + "".join(
        FAULT.format(kind=kind, target=target, at=first + 14 * index, parameters=parameters)
        for index, (kind, target, parameters) in enumerate(faults)
    )
    experiment = experiment_file.decode(text.encode(), source="isolation.toml")
    resolved = loop.resolve(experiment, text.encode(), lab.inventory_model)
    finished = loop.execute(resolved, lab.inventory_model, out=tmp_path, progress=print, **options)
    lab.forget_connections()
    checks = {check.name.removesuffix(".min").removesuffix(".max"): check for check in finished.verdict.checks}
    print(
        [kind for kind, *_ in faults], *((name, one.verdict, one.observed, one.detail) for name, one in checks.items())
    )
    return finished, checks


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: "+".join(kind for kind, *_ in group))
def test_faults_beside_the_bystanders_path_leave_it_alone(lab, tmp_path, group):
    assert {kind for kind, *_ in group} <= set(CATALOGUE)
    finished, checks = run(lab, tmp_path, group)
    assert finished.verdict.lab_state == "CLEAN"
    by_name = {name: one for name, one in checks.items() if name.startswith("bystander.")}
    assert len(by_name) == 3
    assert Verdict.FAIL not in {one.verdict for one in by_name.values()}, by_name
    assert by_name["bystander.goodput_ratio"].observed > 0.8


def test_bystander_is_affected_by_loss_on_both_uplinks_of_its_switch(lab, tmp_path):
    faults = [("packet.drop", f"rtsw1:ctsw{spine}", "share = 0.3") for spine in (1, 2)]
    finished, checks = run(lab, tmp_path, faults)
    assert finished.verdict.lab_state == "CLEAN"
    assert checks["bystander.goodput_ratio"].observed < 0.8
    assert finished.verdict.verdict is not Verdict.PASS


def test_noop_faults_beside_a_bystander_are_inconclusive(lab, tmp_path):
    finished, checks = run(lab, tmp_path, GROUPS[0][:2], mutations={"faults": "noop"})
    assert finished.verdict.verdict is Verdict.INCONCLUSIVE
    assert checks["bystander.goodput_ratio"].verdict is Verdict.INCONCLUSIVE
