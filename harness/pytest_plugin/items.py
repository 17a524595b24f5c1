"""Run experiments as pytest items.

PASS passes and every other verdict fails. An experiment that does not fit the lab, or that its owner does not allow, is
skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from faultbed.harness.experiment import experiment_file as experiment_module
from faultbed.harness.pytest_plugin.session_lab import (
    acquire_lease,
    closing_after_error,
    inventory_of,
    open_session_lab,
)
from faultbed.harness.pytest_plugin.skips import skip
from faultbed.harness.run import loop as run_module
from faultbed.harness.verdict import Verdict, exit_code
from faultbed.testbed.errors import FaultbedError, Unsupported

__all__ = ["ExperimentFailed", "ExperimentFile", "ExperimentItem"]


class ExperimentFile(pytest.File):
    """A TOML file with one experiment."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield one item, or N items with `--faultbed-repeat N`, named like pytest's parametrized tests."""
        count = int(self.config.getoption("--faultbed-repeat"))
        for name in [f"{self.path.stem}[round{number}]" for number in range(count)] if count > 1 else [self.path.stem]:
            yield ExperimentItem.from_parent(self, name=name)


class ExperimentItem(pytest.Item):
    """A pytest item that runs one experiment."""

    def runtest(self) -> None:
        """Run the experiment.

        Raises:
            ExperimentFailed: the verdict is not PASS, or the lab is DIRTY.
        """
        inventory = inventory_of(self.config)
        experiment = experiment_module.load(self.path)
        try:
            resolved = run_module.resolve(experiment, self.path.read_bytes(), inventory)
        except Unsupported as reason:
            skip(self.config, str(reason))
        if forbidden := run_module.refusal(resolved, inventory):
            skip(self.config, str(forbidden))
        session_lab = open_session_lab(self.config)
        out = Path(self.config.getoption("--faultbed-runs"))
        guard = acquire_lease(self.config).refresh
        try:
            with closing_after_error(self.config):
                session_lab.reset_or_reject_dirty()
                finished = run_module.execute(resolved, inventory, out=out, progress=lambda _: None, guard=guard)
        except BaseException:
            session_lab.invalidate_baseline()
            raise
        verdict = finished.verdict
        # The run has reset the lab, so its machines have restarted.
        session_lab.lab.forget_connections()
        if verdict.lab_state != "CLEAN":
            session_lab.invalidate_baseline()
        self.user_properties.append(("verdict", str(verdict.verdict)))
        self.user_properties.append(("started_utc", verdict.started_utc))
        self.user_properties.append(("faultbed_exit_code", int(exit_code(verdict.verdict, verdict.lab_state))))
        self.user_properties.append(("report", str(finished.report)))
        for check in verdict.checks:
            outcome = f"{check.verdict} observed {check.observed} bound {check.bound}"
            self.user_properties.append((f"check.{check.name}", outcome))
        for receipt in verdict.faults:
            self.user_properties.append((f"receipt.{receipt.id}", msgspec.json.encode(receipt).decode()))
        if verdict.verdict is not Verdict.PASS or verdict.lab_state != "CLEAN":
            raise ExperimentFailed(finished)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the message of a failed experiment or a `FaultbedError`; other errors get a traceback."""
        if isinstance(excinfo.value, (ExperimentFailed, FaultbedError)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Return the file and the name of the experiment."""
        return self.path, None, f"experiment {self.name}"


class ExperimentFailed(Exception):
    """The verdict of an experiment is not PASS. `lab_state` is the state of the lab afterwards."""

    def __init__(self, finished: run_module.Finished) -> None:
        verdict = finished.verdict
        self.lab_state = verdict.lab_state
        failed = [check for check in verdict.checks if check.verdict is not Verdict.PASS]
        lines = [f"{verdict.experiment}: {verdict.verdict}, lab {verdict.lab_state}; report {finished.report}"]
        lines += [
            f"  {check.verdict} {check.name}: {check.detail or check.meaning} (observed {check.observed})"
            for check in failed
        ]
        super().__init__("\n".join(lines))
