"""Commands about causes: attribute, campaign."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
import msgspec

from faultbed.harness.attribution import campaign as campaign_module
from faultbed.harness.attribution import confusion
from faultbed.harness.attribution.attribute import attribute as attribute_run
from faultbed.harness.attribution.campaign import Label
from faultbed.harness.cli.context import Session, json_option, pass_session
from faultbed.harness.cli.experiments.making_runs import runs_made
from faultbed.harness.cli.options.sharding import shard_option, workers_options
from faultbed.harness.conditions import unmet
from faultbed.harness.confidence import Interval
from faultbed.harness.experiment import experiment_file as experiment_module
from faultbed.harness.record.copies import digest_of
from faultbed.harness.record.rundir import open_run
from faultbed.harness.run import loop as run_module
from faultbed.harness.run.loop import ResolvedRun
from faultbed.harness.run.sweeps.shards import Shard, shard_of
from faultbed.harness.run.workers.worker_places import Place, with_options
from faultbed.harness.verdict import ExitCode, Verdict, VerdictFile, exit_code, worst
from faultbed.testbed.errors import LabError, UsageError
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.suggestions import hint

__all__ = ["COMMANDS"]

_ERRORS = 3
"""Number of consecutive runs in ERROR after which a campaign stops."""


@click.command()
@click.argument("run_dirs", nargs=-1, required=True, type=click.Path(file_okay=False, path_type=Path))
@json_option
@pass_session
def attribute(session: Session, *, run_dirs: tuple[Path, ...], as_json: bool) -> None:
    """Locate the cause of trouble in each run without its fault plan, then compare it with the faults.

    Precision, recall and the confusion matrix are computed over the RUN_DIRS whose faults provably fired, without those
    that are an ERROR.
    """
    runs = [(run.path, run.read_run(), run.read_flights(), run.read_probes().trips) for run in map(open_run, run_dirs)]
    originals: dict[str, Path] = {}
    for path, measured, _, _ in runs:
        if (original := originals.setdefault(digest_of(measured), path)) != path:
            raise UsageError(f"{path} is a copy of {original}; name each run once")
    findings_by_run = {path: attribute_run(measured, flights, probes) for path, measured, flights, probes in runs}
    total = confusion.score(((measured, flights) for _, measured, flights, _ in runs), [probes for *_, probes in runs])
    if as_json:
        session.json(
            {
                "runs": {str(path): msgspec.to_builtins(findings) for path, findings in findings_by_run.items()},
                "judged": total.runs,
                "precision": _proportion(total.precision, total.correct, total.correct + total.false),
                "recall": _proportion(total.recall, total.found, total.found + total.missed),
                "single": {"runs": total.single, "right": total.right, "network_right": total.network_right},
                "matrix": [
                    {"true": true, "said": named, "runs": n} for (true, named), n in sorted(total.matrix.items())
                ],
            }
        )
        return
    rows = [
        (
            path.resolve().name,
            finding.cause,
            f"{finding.place} {finding.name}",
            f"{finding.confidence:.2f}",
            "; ".join(finding.evidence[:3]),
        )
        for path, findings in findings_by_run.items()
        for finding in findings
    ]
    session.table(("run", "cause", "place", "confidence", "evidence"), rows)
    if left_out := len(runs) - total.runs:
        session.out.print(
            f"\n{left_out} of {len(runs)} runs are not scored: a fault is not proven, or the run is an ERROR"
        )
    if total.precision and total.recall:
        session.out.print(
            f"\nagainst the faults of {total.runs} runs: precision {total.correct}/{total.correct + total.false} "
            f"({_interval_text(total.precision)}), recall {total.found}/{total.found + total.missed} "
            f"({_interval_text(total.recall)})"
        )
    if total.single:
        session.out.print(
            f"{total.single} runs of at most one fault: culprit right in {total.right}, network or not right in "
            f"{total.network_right}. Kinds of place, true (rows) and blamed (columns):"
        )
        session.table(*_square(total.matrix))


def _square(matrix: Counter[tuple[str, str]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return columns and rows of the confusion matrix. A row is a true place."""
    blamed = sorted({place for _, place in matrix})
    rows = [
        (true, *(str(matrix[true, place] or "") for place in blamed), str(sum(matrix[true, place] for place in blamed)))
        for true in sorted({place for place, _ in matrix})
    ]
    return ("true place / blamed", *blamed, "runs"), rows


@click.command()
@click.option("--only", multiple=True, metavar="KIND", help="Only faults of this kind; repeatable.")
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of places and strengths of faults.")
@click.option(
    "--places", type=click.IntRange(min=1), default=3, show_default=True, help="Maximum number of places for each kind."
)
@click.option(
    "--probe",
    is_flag=True,
    help="Probe the fabric during the job, as [probe] does; adds delays, which only probes can locate.",
)
@shard_option
@workers_options
@click.option("--plan", "only_plan", is_flag=True, help="List the runs without running them.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/campaign"),
    show_default=True,
    help="Folder of run directories; an existing run of this lab and these options is not repeated.",
)
@pass_session
def campaign(
    session: Session,
    *,
    only: tuple[str, ...],
    seed: int,
    places: int,
    probe: bool,
    shard: Shard | None,
    place: Place | None,
    jobs: int | None,
    interface: str | None,
    only_plan: bool,
    out: Path,
) -> int:
    """Run short experiments with each kind of fault at several places, as ground truth for attribution.

    A run takes about half a minute; kinds take turns. The command can be ended at any time, and resumes. Another seed
    is another campaign. `attribute` on the runs below --out prints the score. With --shard or --on, several labs
    share the runs.

    Exit codes, over all runs of the campaign, those of earlier calls included: 0 every run is PASS or FAIL (a job may
    not survive its fault); 2 a run is INCONCLUSIVE, or a FAIL without proof of its fault, or left the lab DIRTY (remove
    its run directory to repeat it); 3 a run is an ERROR, which the next call repeats; 5 the lab is DIRTY.
    """
    place = with_options(place, jobs=jobs, interface=interface)
    if place is not None and (shard is not None or only_plan):
        raise click.UsageError("--on makes the runs on labs of its own; give it without --shard and --plan")
    inventory = session.inventory()
    every = campaign_module.labels(inventory.topology, lab_kind=inventory.kind, seed=seed, places=places, probe=probe)
    _refuse_unknown(only, sorted({label.kind for label in every if label.kind is not None}), inventory.name)
    selected = [
        (label, _resolved(label, inventory, probe=probe))
        for label in campaign_module.in_turn(label for label in every if not only or label.kind in only)
    ]
    if shard is not None:
        selected = shard_of(shard, selected, lambda labelled: labelled[1])
    if only_plan:
        rows = [
            (
                label.name,
                label.kind or "none",
                label.target,
                ", ".join(f"{name} {value}" for name, value in label.parameters.items()),
            )
            for label, _ in selected
        ]
        session.table(("run", "fault", "place", "with"), rows)
        return ExitCode.PASS
    earlier = [(label, resolved, _earlier_verdicts(out, label.name, resolved)) for label, resolved in selected]
    verdicts = [_counted(verdict) for *_, known in earlier for verdict in known]
    due = [(label, resolved) for label, resolved, known in earlier if not known]
    if not due:
        return exit_code(worst((Verdict.PASS, *verdicts)), "CLEAN")
    with (
        runs_made(session, inventory, out, place=place, why="campaign") as (make, progress),
        contextlib.closing(make([resolved for _, resolved in due], out)) as made,
    ):
        in_error = 0
        for (label, _), finished in zip(due, made, strict=True):
            progress(f"{label.name}: {_outcome(finished.verdict)}")
            verdicts.append(_counted(finished.verdict))
            in_error = in_error + 1 if finished.verdict.verdict == Verdict.ERROR else 0
            if in_error == _ERRORS:
                raise LabError(f"the last {_ERRORS} runs of the campaign were errors: {_outcome(finished.verdict)}")
    return exit_code(worst((Verdict.PASS, *verdicts)), "CLEAN")


def _counted(verdict: VerdictFile) -> Verdict:
    """Return a run's verdict for the campaign, to which a FAIL is as good as a PASS if the fault is proven.

    A FAIL may hide that the fault is not proven. Neither verdict says that the lab was left DIRTY.
    """
    if verdict.verdict not in (Verdict.PASS, Verdict.FAIL):
        return verdict.verdict
    is_truth = verdict.lab_state == "CLEAN" and not unmet(verdict.checks)
    return Verdict.PASS if is_truth else Verdict.INCONCLUSIVE


def _refuse_unknown(only: Iterable[str], kinds: Sequence[str], lab: str) -> None:
    """Reject a kind of which the campaign has no run: leaving it out would end with PASS, as if it had been run.

    Raises:
        UsageError: with the kind that may have been meant.
    """
    for kind in only:
        if kind not in kinds:
            raise UsageError(f"--only {kind}: the campaign of {lab} has no such run; {hint(kind, kinds)}")


def _resolved(label: Label, inventory: Inventory, *, probe: bool) -> ResolvedRun:
    source = campaign_module.experiment(label, inventory.topology, probe=probe)
    return run_module.resolve(experiment_module.decode(source, source=label.name), source, inventory)


def _earlier_verdicts(out: Path, name: str, resolved: ResolvedRun) -> list[VerdictFile]:
    """Return the verdicts of finished runs of this name, experiment and inventory.

    A run that was an ERROR is left out, because it is repeated. A campaign with probes has runs of the same names as
    one without, and so has one on another lab.
    """
    runs = [open_run(path.parent) for path in sorted(out.glob(f"*-{name}-*/verdict.json"))]
    verdicts = [
        run.read_verdict()
        for run in runs
        if run.read_experiment() == resolved.source and run.read_plan().inventory == resolved.plan.inventory
    ]
    return [verdict for verdict in verdicts if verdict.verdict is not Verdict.ERROR]


def _outcome(verdict: VerdictFile) -> str:
    if verdict.verdict == Verdict.ERROR:
        failed = next((check.detail for check in verdict.checks if check.verdict == Verdict.ERROR), "no check says why")
        return f"ERROR, {failed}"
    top = verdict.attribution[0]
    return f"{verdict.verdict}, attributed to {top.cause} at {top.name or 'nowhere'}"


def _proportion(interval: Interval | None, count: int, of: int) -> dict[str, float] | None:
    return None if interval is None else {"count": count, "of": of, "low": interval.low, "high": interval.high}


def _interval_text(interval: Interval) -> str:
    return f"{interval.low:.2f}..{interval.high:.2f}, {100 * interval.level:g} %"


COMMANDS = (attribute, campaign)
