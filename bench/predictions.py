"""Part `predictions` of the bench: how far real runs are from the model's predictions of them.

The model is calibrated by fault-free runs of the lab (`CALIBRATING`). Then `HELD_OUT`, other experiments of other
sizes, collectives and routing, are predicted before they run: no path and no time of theirs is known to the model. Two
held-out experiments that differ in one parameter are a what-if. It counts if the measured times differ by more than
10 %; the predicted times must then differ in the same direction.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from bench.rows import Row, mark
from faultbed.harness.analysis.links.expected_load import carried, expected_loads, worst_difference
from faultbed.harness.analysis.links.link_load import link_loads
from faultbed.harness.experiment import experiment_file
from faultbed.harness.model.calibration import Calibration, Conditions, Sample, fit
from faultbed.harness.model.calibration_samples import iteration_seconds, samples_of
from faultbed.harness.model.experiment_prediction import default_parameters, predict
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.record.rundir import open_run
from faultbed.harness.run.prepare.resolve import resolve
from faultbed.testbed.errors import LabError
from faultbed.testbed.inventory.lab_inventory import Inventory

__all__ = ["CALIBRATING", "HELD_OUT", "Case", "Outcome", "experiment_text", "measure", "rows_of", "what_ifs"]

KIB = 1024
ITERATIONS = 12
WHAT_IF = 0.10
"""Least difference of two measured times whose direction is checked."""
MOST_LINK_ERROR = 0.03
MOST_TIME_ERRORS = (0.15, 0.30)
"""Median and 90th percentile."""
SIGNS, INSIDE = 0.95, 0.9
_PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A fault-free collective on the first `ranks` hosts of a lab."""

    collective: str
    algorithm: str
    size_bytes: int
    qps: int = 1
    ranks: int = 4
    routing: str = "static-parity"

    @property
    def name(self) -> str:
        """A name for files and progress."""
        size = f"{self.size_bytes // KIB}k"
        return f"{self.collective}-{self.algorithm}-{size}-{self.ranks}x{self.qps}-{self.routing}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A case with its predicted and measured time of an iteration, in s.

    `link_error` is the largest difference between the expected and the counted bytes of a link between switches, as a
    share of the fullest link; None: the bytes of this run cannot be predicted, or were not read.
    """

    case: Case
    predicted_s: float
    measured_s: float
    link_error: float | None

    @property
    def error(self) -> float:
        """Predicted over measured time, minus 1."""
        return self.predicted_s / self.measured_s - 1


def _all_reduces(sizes: Sequence[int], qps: Sequence[int]) -> tuple[Case, ...]:
    return tuple(
        Case(collective="all-reduce", algorithm="ring", size_bytes=size, qps=count)
        for size, count in zip(sizes, qps, strict=True)
    )


CALIBRATING = (
    *_all_reduces((8 * KIB, 32 * KIB, 128 * KIB, 512 * KIB), (1, 4, 1, 4)),
    Case(collective="all-reduce", algorithm="double-binary-tree", size_bytes=8 * KIB),
    Case(collective="all-reduce", algorithm="double-binary-tree", size_bytes=128 * KIB, qps=4),
    Case(collective="all-reduce", algorithm="full-mesh", size_bytes=32 * KIB),
    Case(collective="all-to-all", algorithm="full-mesh", size_bytes=8 * KIB),
    Case(collective="all-to-all", algorithm="full-mesh", size_bytes=128 * KIB, qps=4),
    Case(collective="all-gather", algorithm="ring", size_bytes=128 * KIB),
    Case(collective="reduce-scatter", algorithm="ring", size_bytes=32 * KIB, qps=4),
    Case(collective="all-reduce", algorithm="ring", size_bytes=128 * KIB, ranks=2),
)
HELD_OUT = (
    *_all_reduces((16 * KIB, 64 * KIB, 256 * KIB, 384 * KIB), (1, 1, 1, 1)),
    *_all_reduces((64 * KIB, 256 * KIB), (4, 4)),
    Case(collective="all-reduce", algorithm="recursive-doubling", size_bytes=64 * KIB),
    Case(collective="all-reduce", algorithm="recursive-halving", size_bytes=64 * KIB),
    Case(collective="all-reduce", algorithm="full-mesh", size_bytes=64 * KIB),
    Case(collective="all-reduce", algorithm="ring", size_bytes=64 * KIB, ranks=2),
    Case(collective="all-reduce", algorithm="ring", size_bytes=256 * KIB, ranks=2),
    Case(collective="all-to-all", algorithm="full-mesh", size_bytes=64 * KIB),
    Case(collective="all-to-all", algorithm="full-mesh", size_bytes=256 * KIB, qps=4),
    Case(collective="all-to-all", algorithm="full-mesh", size_bytes=256 * KIB, qps=4, routing="ecmp"),
    Case(collective="all-gather", algorithm="ring", size_bytes=64 * KIB),
    Case(collective="all-gather", algorithm="full-mesh", size_bytes=256 * KIB),
    Case(collective="reduce-scatter", algorithm="ring", size_bytes=256 * KIB),
    Case(collective="reduce-scatter", algorithm="recursive-halving", size_bytes=64 * KIB, qps=4),
    Case(collective="broadcast", algorithm="ring", size_bytes=128 * KIB),
    Case(collective="all-reduce", algorithm="ring", size_bytes=256 * KIB, qps=4, routing="ecmp"),
)


def experiment_text(case: Case) -> str:
    """Return the experiment file of a case."""
    ranks = ", ".join(f'"host[{index}]:rnic[0]"' for index in range(case.ranks))
    return f"""name = "{case.name}"
[fabric]
routing = "{case.routing}"
[workload]
collective = "{case.collective}"
algorithm = "{case.algorithm}"
size = "{case.size_bytes // KIB}KiB"
ranks = [{ranks}]
qps_per_peer = {case.qps}
warmup = 2
iterations = {ITERATIONS}
qp = {{ timeout = 21 }}
[[expect]]
metric = "wrong_elements"
max = 0
"""


def measure(inventory: Inventory, progress: Callable[[str], None]) -> Iterator[Row]:
    """Calibrate by runs on a lab that is up, then yield rows about experiments that did not calibrate.

    Raises:
        LabError: a run did not finish its iterations.
    """
    with tempfile.TemporaryDirectory(prefix="faultbed-predictions-") as folder:
        samples: dict[str, Sample] = {}
        conditions: Conditions | None = None
        for number, case in enumerate(CALIBRATING, 1):
            progress(f"calibrating run {number} of {len(CALIBRATING)}: {case.name}")
            directory = _run(inventory, case, Path(folder))
            samples |= samples_of(case.name, open_run(directory).read_run())
            conditions = conditions or _conditions(directory)
        if conditions is None:
            raise LabError("bench predictions: no run calibrates the model")
        calibration = fit(samples, conditions, default_parameters(inventory.kind))
        outcomes = []
        for number, case in enumerate(HELD_OUT, 1):
            predicted_s = _predicted_s(inventory, case, calibration)
            run = open_run(_run(inventory, case, Path(folder))).read_run()
            measured_s = iteration_seconds(run.workload.series)
            if measured_s is None:
                raise LabError(f"bench predictions: {case.name} finished fewer than two iterations")
            outcome = Outcome(case=case, predicted_s=predicted_s, measured_s=measured_s, link_error=_link_error(run))
            outcomes.append(outcome)
            progress(
                f"{number} of {len(HELD_OUT)}: {case.name}: predicted {predicted_s * 1e3:.0f} ms, measured "
                f"{measured_s * 1e3:.0f} ms ({outcome.error:+.0%})"
            )
    yield from rows_of(outcomes, calibration.band)


def rows_of(outcomes: Sequence[Outcome], band: float) -> Iterator[Row]:
    """Yield the rows about held-out experiments; `band` is the calibration's, 0.14 is ±14 %."""
    size = np.abs([outcome.error for outcome in outcomes])
    worst = max(outcomes, key=lambda outcome: abs(outcome.error))
    middle, most = float(np.median(size)), float(np.percentile(size, 90))
    yield (
        f"predicted over measured time - 1, {len(outcomes)} held-out experiments: median; P90",
        f"{middle:.1%}; {most:.1%}",
        f"worst {worst.error:+.0%}: {worst.case.name}",
        "<= 15 %; <= 30 %",
        mark(reached=middle <= MOST_TIME_ERRORS[0] and most <= MOST_TIME_ERRORS[1]),
    )
    links = [outcome.link_error for outcome in outcomes if outcome.link_error is not None]
    yield (
        f"bytes of links: largest difference from the prediction, {len(links)} experiments",
        f"{max(links):.1%}" if links else "not read",
        f"median {float(np.median(links)):.1%}" if links else "",
        "<= 3 %",
        mark(reached=bool(links) and max(links) <= MOST_LINK_ERROR),
    )
    inside = sum(math.log(1 + band) >= abs(math.log(1 + outcome.error)) for outcome in outcomes)
    yield (
        f"measured times within the stated band of ±{band:.0%}",
        f"{inside} of {len(outcomes)}",
        "",
        f">= {INSIDE:.0%}",
        mark(reached=inside >= INSIDE * len(outcomes)),
    )
    agreeing, checked = what_ifs(outcomes)
    yield (
        f"what-ifs of one parameter whose measured effect exceeds {WHAT_IF:.0%}: same direction",
        f"{agreeing} of {checked}",
        "",
        f">= {SIGNS:.0%}",
        mark(reached=checked > 0 and agreeing >= SIGNS * checked),
    )


def what_ifs(outcomes: Sequence[Outcome]) -> tuple[int, int]:
    """Return (agreeing, checked): pairs of cases that differ in one field, and by more than `WHAT_IF` as measured."""
    agreeing = checked = 0
    for first, second in itertools.combinations(outcomes, 2):
        apart = [
            field.name for field in fields(Case) if getattr(first.case, field.name) != getattr(second.case, field.name)
        ]
        measured = math.log(second.measured_s / first.measured_s)
        if len(apart) == 1 and abs(measured) > math.log(1 + WHAT_IF):
            checked += 1
            agreeing += measured * math.log(second.predicted_s / first.predicted_s) > 0
    return agreeing, checked


def _run(inventory: Inventory, case: Case, folder: Path) -> Path:
    """Run a case and return its run directory."""
    file = folder / f"{case.name}.toml"
    file.write_text(experiment_text(case), encoding="utf-8")
    out = folder / "runs" / case.name
    done = subprocess.run(
        [sys.executable, "-m", "faultbed", "--lab", str(inventory.path), "run", str(file), "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
        check=False,
    )
    directories = sorted(path.parent for path in out.glob("*/verdict.json"))
    if done.returncode or not directories:
        raise LabError(f"bench predictions: the run of {case.name} returned {done.returncode}: {done.stderr[-800:]}")
    return directories[0]


def _conditions(directory: Path) -> Conditions:
    opened = open_run(directory)
    lab = opened.read_run().lab
    return Conditions(
        lab=lab.name,
        inventory=opened.read_plan().inventory,
        accelerator=lab.accelerator,
        cpus=opened.read_environment().cpu_count,
    )


def _predicted_s(inventory: Inventory, case: Case, calibration: Calibration) -> float:
    content = experiment_text(case).encode()
    resolved = resolve(experiment_file.decode(content, source=case.name), content, inventory)
    prediction = predict(resolved.experiment, resolved.faults, inventory, calibration.parameters)
    if prediction.fault_free.iteration_s is None:
        raise LabError(f"bench predictions: the model gives no time for {case.name}")
    return prediction.fault_free.iteration_s.median


def _link_error(run: RunEvidence) -> float | None:
    worst = worst_difference(expected_loads(run), carried(link_loads(run)))
    return None if worst is None else worst[0]
