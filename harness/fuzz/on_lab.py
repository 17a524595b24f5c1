"""Run fuzz cases on a lab, and write each failure as an experiment."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from faultbed.harness.experiment import experiment_file
from faultbed.harness.fuzz.case import SEED, Case, describe, describe_fault, to_toml
from faultbed.harness.fuzz.outcome import Failure, Outcome, outcome_of
from faultbed.harness.record import rundir
from faultbed.harness.run import loop
from faultbed.testbed import shipped
from faultbed.testbed.backends.lab_backend import backend_of
from faultbed.testbed.directories import lab_dir
from faultbed.testbed.errors import DirtyLab, FaultbedError, UsageError
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.tenancy import interventions

__all__ = ["Runner", "keep", "next_number"]


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs cases on a lab, one after the other. `guard` raises an error if the reservation of the lab was lost."""

    inventory: Inventory
    out: Path
    progress: Callable[[str], None]
    guard: Callable[[], None]

    def __call__(self, case: Case) -> Outcome:
        """Run a case and judge it. A soft lab that is DIRTY afterwards goes back to its snapshot.

        Raises:
            DirtyLab: a rack lab is DIRTY afterwards.
            Intervened: another command has ended the faults of the lab, so that the run shows nothing.
            FaultbedError: the lab is not up, or the run could not be recorded.
        """
        source = to_toml(case).encode()
        resolved = loop.resolve(experiment_file.decode(source, source="fuzz"), source, self.inventory)
        try:
            finished = loop.execute(resolved, self.inventory, out=self.out, progress=self.progress, guard=self.guard)
        except Exception as error:
            defect = _defect_in(error)
            if defect is None:
                raise
            self._restore(case, see=str(error))
            message = traceback.format_exception_only(defect)[-1].strip()
            return Outcome(verdict="ERROR", failures={f"crash.{type(defect).__name__}": message})
        interventions.refuse(lab_dir(self.inventory.name), self.inventory.name)
        if finished.verdict.lab_state == "DIRTY":
            self._restore(case, see=str(finished.report))
        return outcome_of(case, finished.verdict, run_dir=finished.run_dir.path)

    def _restore(self, case: Case, *, see: str) -> None:
        if not backend_of(self.inventory.kind).reset(self.inventory, self.progress):
            raise DirtyLab(
                f"{self.inventory.name} is DIRTY after {describe(case)}: see {see}; run `faultbed heal`, then repeat"
            )


def _defect_in(error: Exception) -> Exception | None:
    """Return the exception that shows a defect of faultbed behind an error; None if the lab or a file caused it."""
    known = (FaultbedError, OSError)
    if not isinstance(error, known):
        return error
    return cause if isinstance(cause := error.__cause__, Exception) and not isinstance(cause, known) else None


def next_number(out: Path) -> int:
    """Return the number of the next folder `found-N`, above those of earlier searches."""
    numbers = (path.name.removeprefix("found-") for path in out.glob("found-*"))
    return max((int(number) for number in numbers if number.isdecimal()), default=0) + 1


def keep(failure: Failure, folder: Path, inventory: Inventory) -> Path:
    """Write a failure into `folder` as `experiment.toml` and `repro.sh`, and return the folder.

    Raises:
        UsageError: it cannot be written.
    """
    comments = [
        f"Found by `faultbed fuzz` on {inventory.name}. It fails: {', '.join(failure.checks)}.",
        *(f"  {name}: {' '.join(failure.outcome.failures.get(name, '').split())}" for name in failure.checks),
        f"Shrunk from {len(failure.first.faults)} faults to {len(failure.smallest.faults)} in {failure.runs} runs.",
        "The first case that failed:",
        *(f"  {describe_fault(fault)}" for fault in failure.first.faults),
    ]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "experiment.toml").write_text(to_toml(failure.smallest, comments=comments))
        script = folder / "repro.sh"
        script.write_bytes(rundir.repro_script(seed=SEED, lab=shipped.inventory_word(inventory.path)))
        script.chmod(0o755)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror or error}; choose another --out") from error
    return folder
