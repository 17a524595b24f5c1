"""A run whose injector does nothing must never look like a pass: one test for each kind of fault."""

import pytest

from harness import experiment as experiment_module
from harness import run as run_module
from harness.verdict import Verdict, exit_code

pytestmark = [pytest.mark.soft, pytest.mark.needs("hosts >= 4")]

EXPERIMENT = """
name = "noop-{name}"
seed = 1

[workload]
collective = "all-reduce"
algorithm = "ring"
size = "128KiB"
duration = "9s"
compute_units = 2

[[faults]]
kind = "{kind}"
target = "{target}"
at = "5s"
for = "2s"
set = {{ {settings} }}

[[expect]]
metric = "wrong_elements"
max = 0
"""


@pytest.mark.parametrize(
    ("kind", "target", "settings"),
    [
        ("link.flap", "rtsw1:ctsw1", ""),
        ("packet.drop", "host3:rxe0", "share = 0.05"),
        ("gpu.throttle", "host2:gpu0", "percent = 50"),
    ],
)
def test_a_run_whose_fault_does_nothing_is_inconclusive(lab, tmp_path, kind, target, settings):
    """Everything else is as it should be, and still the verdict is INCONCLUSIVE, with the reason."""
    text = EXPERIMENT.format(name=kind.replace(".", "-"), kind=kind, target=target, settings=settings)
    path = tmp_path / "noop.toml"
    path.write_text(text)
    decided = run_module.decide(experiment_module.load(path), text.encode(), lab.inventory_model)
    finished = run_module.execute(decided, lab.inventory_model, out=tmp_path, progress=lambda _: None, mutate="noop")
    verdict = finished.verdict
    assert verdict.verdict is Verdict.INCONCLUSIVE, verdict.checks
    assert exit_code(verdict.verdict, verdict.lab_state) == 2
    assert verdict.lab_state == "CLEAN"
    assert verdict.faults[0].fired.count == 0
    assert "<title>" in finished.report.read_text()
