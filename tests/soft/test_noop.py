"""A run whose faults do nothing must never look like a pass, whichever faults it has."""

import pytest

from faultbed.harness.experiment import experiment_file as experiment_module
from faultbed.harness.run import loop as run_module
from faultbed.harness.verdict import Verdict, exit_code

pytestmark = [pytest.mark.soft, pytest.mark.needs("hosts >= 4")]

EXPERIMENT = """
name = "noop"
seed = 1

[workload]
collective = "all-reduce"
algorithm = "ring"
size = "128KiB"
duration = "7s"
compute_units = 2

[[faults]]
id = "flap"
kind = "link.flap"
target = "rtsw1:ctsw1"
at = "2s"
for = "1s"

[[faults]]
id = "drop"
kind = "packet.drop"
target = "host3:rxe0"
at = "3500ms"
for = "1s"
set = { share = 0.05 }

[[faults]]
id = "throttle"
kind = "gpu.throttle"
target = "host2:gpu0"
at = "5s"
for = "1s"
set = { percent = 50 }

[[expect]]
metric = "wrong_elements"
max = 0
"""


def test_run_whose_faults_do_nothing_is_inconclusive_for_each_fault(lab, tmp_path):
    """A control run meets all its bounds, and its verdict is still INCONCLUSIVE with each fault as a reason."""
    path = tmp_path / "noop.toml"
    path.write_text(EXPERIMENT)
    resolved = run_module.resolve(experiment_module.load(path), EXPERIMENT.encode(), lab.inventory_model)
    finished = run_module.execute(resolved, lab.inventory_model, out=tmp_path, progress=lambda _: None, control=True)
    verdict = finished.verdict
    assert verdict.verdict is Verdict.INCONCLUSIVE, verdict.checks
    assert exit_code(verdict.verdict, verdict.lab_state) == 2
    assert verdict.lab_state == "CLEAN"
    assert [fault.fired.count for fault in verdict.faults] == [0, 0, 0]
    checks = {check.name: check.verdict for check in verdict.checks}
    assert {name: checks[f"fired.{name}"] for name in ("flap", "drop", "throttle")} == dict.fromkeys(
        ("flap", "drop", "throttle"), Verdict.INCONCLUSIVE
    )
    assert checks["wrong_elements"] is Verdict.PASS
    cost = verdict.checks[0]
    assert (cost.name, cost.verdict) == ("control_run", Verdict.INCONCLUSIVE)
    assert cost.observed is not None, "the twin is run for it, though no expectation asks for one"
    assert "armed, zero intensity" in cost.detail
    assert "<title>" in finished.report.read_text()
