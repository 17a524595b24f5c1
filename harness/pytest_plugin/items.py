"""Experiments as test items: PASS passes, everything else fails, and what does not fit the lab is skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.experiment import experiment_file as experiment_module
from harness.pytest_plugin.session_lab import held, inventory_of, keeper_of, or_give_up
from harness.pytest_plugin.skips import skip
from harness.run import loop as run_module
from harness.verdict import Verdict, exit_code
from testbed.errors import FaultbedError, Unsupported

__all__ = ["ExperimentFailed", "ExperimentFile", "ExperimentItem"]


class ExperimentFile(pytest.File):
    """A file with one experiment."""

    def collect(self) -> Iterator[pytest.Item]:
        """The one item; with `--faultbed-repeat N` as many, named as pytest names those of a test."""
        count = int(self.config.getoption("--faultbed-repeat"))
        for name in [f"{self.path.stem}[round{number}]" for number in range(count)] if count > 1 else [self.path.stem]:
            yield ExperimentItem.from_parent(self, name=name)


class ExperimentItem(pytest.Item):
    """An experiment as a test."""

    def runtest(self) -> None:
        """Run it, and raise what is not a PASS."""
        inventory = inventory_of(self.config)
        experiment = experiment_module.load(self.path)
        try:
            decided = run_module.decide(experiment, self.path.read_bytes(), inventory)
        except Unsupported as reason:
            skip(self.config, str(reason))
        if forbidden := run_module.refusal(decided, inventory):
            skip(self.config, str(forbidden))
        keeper = keeper_of(self.config)
        out = Path(self.config.getoption("--faultbed-runs"))
        guard = held(self.config).refresh
        try:
            with or_give_up(self.config):
                keeper.refuse_dirty()
                finished = run_module.execute(decided, inventory, out=out, progress=lambda _: None, guard=guard)
        except BaseException:
            keeper.distrust()
            raise
        verdict = finished.verdict
        # The run has put the lab back more than once: machines have been started anew.
        keeper.lab.forget_connections()
        if verdict.lab_state != "CLEAN":
            keeper.distrust()
        self.user_properties.append(("verdict", str(verdict.verdict)))
        self.user_properties.append(("faultbed_exit_code", int(exit_code(verdict.verdict, verdict.lab_state))))
        self.user_properties.append(("report", str(finished.report)))
        for check in verdict.checks:
            said = f"{check.verdict} observed {check.observed} bound {check.bound}"
            self.user_properties.append((f"check.{check.name}", said))
        for receipt in verdict.faults:
            self.user_properties.append((f"receipt.{receipt.id}", msgspec.json.encode(receipt).decode()))
        if verdict.verdict is not Verdict.PASS or verdict.lab_state != "CLEAN":
            raise ExperimentFailed(finished)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """What is wrong, in words; a traceback only for what we did not foresee."""
        if isinstance(excinfo.value, (ExperimentFailed, FaultbedError)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Where it is."""
        return self.path, None, f"experiment {self.name}"


class ExperimentFailed(Exception):
    """An experiment that is not a PASS. `lab_state` says how it left the lab."""

    def __init__(self, finished: run_module.Finished) -> None:
        verdict = finished.verdict
        self.lab_state = verdict.lab_state
        bad = [check for check in verdict.checks if check.verdict is not Verdict.PASS]
        lines = [f"{verdict.experiment}: {verdict.verdict}, lab {verdict.lab_state}; report {finished.report}"]
        lines += [
            f"  {check.verdict} {check.name}: {check.detail or check.rule} (observed {check.observed})" for check in bad
        ]
        super().__init__("\n".join(lines))
