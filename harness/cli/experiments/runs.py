"""Commands about experiments: run, report."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
import msgspec
from rich.text import Text

from faultbed.harness import judge
from faultbed.harness import verdict as verdict_file
from faultbed.harness.bounds import TWIN_RATIO, bounds_of, sampled_bounds
from faultbed.harness.cli.context import COLOURS, Session, json_option, pass_session, styled
from faultbed.harness.cli.experiments.histories import PAIR, show_comparison
from faultbed.harness.cli.experiments.offending import drained_hosts
from faultbed.harness.cli.lab.bringing_up import brought_up, down_option, no_up_option
from faultbed.harness.cli.options.experiment_seed import SEED
from faultbed.harness.cli.options.names import experiment_argument
from faultbed.harness.cli.options.sharding import shard_option, workers_options
from faultbed.harness.confidence import Interval
from faultbed.harness.experiment import experiment_file as experiment_module
from faultbed.harness.experiment import run_plan as plan_module
from faultbed.harness.experiment.experiment_file import Experiment
from faultbed.harness.experiment.parameters import parse_settings, with_values
from faultbed.harness.experiment.workload_file import Job
from faultbed.harness.ledger.statistics import sequential_looks
from faultbed.harness.ledger.statistics.decision import TAIL, tail_for
from faultbed.harness.ledger.statistics.unpaired_runs import WORTH
from faultbed.harness.parts.registry import PARTS
from faultbed.harness.record import rundir
from faultbed.harness.record.run_key import publish
from faultbed.harness.record.rundir import RunDir
from faultbed.harness.report import summary, undecided
from faultbed.harness.report.judged_by import judged_by
from faultbed.harness.run import loop as run_module
from faultbed.harness.run.judge_run import judge_run
from faultbed.harness.run.loop import Finished, ResolvedRun
from faultbed.harness.run.prepare import exclusions
from faultbed.harness.run.prepare.preflight import ALL_CHECKS
from faultbed.harness.run.repeats import pooled, repeated
from faultbed.harness.run.repeats.made_by_workers import made_by
from faultbed.harness.run.repeats.trials import trial_of
from faultbed.harness.run.sweeps.finished_runs import find_finished_runs, join
from faultbed.harness.run.sweeps.shards import Shard, shard_of
from faultbed.harness.run.sweeps.sweep_points import Point
from faultbed.harness.run.workers.worker_places import Place, with_options
from faultbed.harness.verdict import Check, ExcludedHost, Verdict, VerdictFile, exit_code, worst
from faultbed.testbed.backends.lab_backend import backend_of
from faultbed.testbed.errors import ConfigError, Unsupported, UsageError
from faultbed.testbed.extras import extra
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.testbed.tenancy.lab_lease import LabLease, hold

__all__ = ["COMMANDS"]

_MOST, _MOST_WITHOUT_TWIN = 12, 30
"""Default maximum number of runs of `--until-decided`."""


@click.command()
@experiment_argument
@click.argument("shards", nargs=-1, metavar="[DIR]...", type=click.Path(file_okay=False, path_type=Path))
@click.option("--seed", type=SEED, help="Seed of all random choices, instead of the file's.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="PATH=VALUE",
    help="Another value for a key of the file, such as workload.size=1MiB or faults[0].for=3s; repeatable. The run "
    "directory has the file with it.",
)
@click.option("--plan", "only_plan", is_flag=True, help="Print every step and every revert, and do nothing.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Folder of run directories.",
)
@click.option(
    "--repeat",
    default=1,
    show_default=True,
    type=click.IntRange(1, 1000),
    help="Number of runs, with consecutive seeds; they are decided together.",
)
@shard_option
@workers_options
@click.option(
    "--merge",
    is_flag=True,
    help="Run nothing: copy the finished runs in each DIR to --out, and decide the runs of --repeat together.",
)
@click.option(
    "--until-decided",
    is_flag=True,
    help="Repeat with consecutive seeds until all runs together are inside or outside every bound.",
)
@click.option(
    "--most",
    type=click.IntRange(sequential_looks.fewest_runs(TAIL), sequential_looks.MOST),
    help=f"Maximum number of runs of --until-decided; it also fixes after which runs the bounds are tried. "
    f"[default: {_MOST}, or {_MOST_WITHOUT_TWIN} with a bound that no fault-free twin decides]",
)
@click.option(
    "--without", multiple=True, metavar="HOST", help="Exclude this host; ranks are placed on the others. Repeatable."
)
@click.option("--leave-out", is_flag=True, help="Run preflight without burn-in first, and exclude unfit hosts.")
@click.option(
    "--control",
    is_flag=True,
    help="Arm every fault with zero intensity, to measure the cost of the harness. Never a PASS.",
)
@no_up_option
@down_option
@json_option
@pass_session
def run(
    session: Session,
    *,
    experiment: Path,
    shards: tuple[Path, ...],
    seed: int | None,
    settings: tuple[str, ...],
    only_plan: bool,
    out: Path,
    repeat: int,
    shard: Shard | None,
    place: Place | None,
    jobs: int | None,
    interface: str | None,
    merge: bool,
    until_decided: bool,
    most: int | None,
    without: tuple[str, ...],
    leave_out: bool,
    control: bool,
    no_up: bool,
    end_lab: bool,
    as_json: bool,
) -> int:
    """Run an EXPERIMENT: steady state, faults, recovery, verdict.

    A soft lab that is down is brought up first, and stays up (--no-up, --down). It is reset to its snapshot before, and
    compared with it afterwards. All results are in a run directory under --out; its report.html is one file that works
    offline.

    `kill -USR1 PID` during the workload writes the flight recorders of its ranks into the run directory.

    With --on, several labs make the runs of --repeat or --until-decided; runs count in the order of their seeds.

    With --shard, several labs share the runs of --repeat, and the exit code is that of the worst run of the shard. The
    runs are decided together by the shard that finds all of them in --out, or by `--merge DIR...`.
    """
    if shard is not None or merge or shards:
        _refuse_mixed_options(
            shards,
            merge=merge,
            is_sharded=shard is not None,
            others=only_plan or until_decided or leave_out or control or no_up or end_lab or repeat == 1,
        )
    inventory = session.inventory()
    place = with_options(place, jobs, interface)
    others = only_plan or leave_out or control or no_up or end_lab or merge or shard is not None
    _refuse_workers(place, inventory, is_single=repeat == 1 and not until_decided, others=others)
    source, loaded = _with_settings(experiment, settings)
    most = _most_runs(loaded, repeat, until_decided=until_decided, most=most)
    left_out = exclusions.named_by_user(inventory, without)
    (resolved,) = _resolve_each(loaded, source, inventory, [seed], left_out)
    _refuse_drained_spares(session, resolved, inventory, out)
    if only_plan:
        if leave_out:
            raise UsageError("--plan touches no lab, and --leave-out checks its hosts; name hosts by --without instead")
        _show_plan(session, resolved, as_json=as_json)
        if reason := run_module.refusal(resolved, inventory):  # on stderr, so that a plan in JSON stays one document
            session.err.print(f"would be refused: {reason}", soft_wrap=True)
        return 0
    seeds = range(resolved.plan.seed, resolved.plan.seed + (most or repeat))
    if shard is not None or merge:
        trials = _resolve_each(loaded, source, inventory, seeds, left_out)
        point = Point(number=1, parameters={}, experiment=resolved.experiment, runs=tuple(trials))
        return _share(session, point, inventory, out, shard, shards, as_json=as_json)
    if place is not None:
        trials = _resolve_each(loaded, source, inventory, seeds, left_out)
        runs = _run_on(place, trials, inventory, out, session, most=most)
        return _pool(session, runs, loaded, most=most, planned=None if most else repeat, as_json=as_json)
    backend, resets = backend_of(inventory.kind), traits_of(inventory.kind).has_snapshot
    if leave_out and not resets:  # before the reservation, which depends on the hosts that take part
        with session.progress() as progress:
            left_out = exclusions.find_unfit_hosts(inventory, ALL_CHECKS, left_out, progress)
    trials = _resolve_each(loaded, source, inventory, seeds, left_out)
    names = () if resets else {name for trial in trials for name in run_module.touched(trial, inventory.topology)}
    with (
        hold(inventory, sorted(names), why=f"run {resolved.plan.experiment}", mode="exclusive") as holding,
        session.progress(also=holding.heartbeat) as progress,
        brought_up(inventory, progress, no_up=no_up, end_lab=end_lab),
    ):
        if resets and leave_out:
            backend.reset(inventory, progress)  # what a run finds is the snapshot, not what is there now
            left_out = exclusions.find_unfit_hosts(inventory, ALL_CHECKS, left_out, progress)
            trials = _resolve_each(loaded, source, inventory, seeds, left_out)
        runs = _execute_all(trials, inventory, out, progress, holding, most=most, control=control)
    if len(trials) == 1:
        _show(session, runs[0], as_json=as_json)
        return exit_code(runs[0].verdict.verdict, runs[0].verdict.lab_state)
    return _pool(session, runs, loaded, most=most, planned=None if most else repeat, as_json=as_json)


def _with_settings(path: Path, texts: Sequence[str]) -> tuple[bytes, Experiment]:
    """Return an experiment file with the values of `--set`, and what it is. Without any, the file is unchanged."""
    if not texts:
        return path.read_bytes(), experiment_module.load(path)
    content, experiment = with_values(path.read_bytes(), parse_settings(texts), source=str(path))
    return f"# {path.name} with {'; '.join(texts)}\n".encode() + content, experiment


def _pool(
    session: Session,
    runs: Sequence[Finished],
    loaded: Experiment,
    *,
    most: int | None,
    planned: int | None,
    as_json: bool,
) -> int:
    """Decide several runs together, record and print that, and return the exit code."""
    pool = pooled.pool([_trial(finished, loaded) for finished in runs], loaded.expectations, most=most)
    written = rundir.write_pooled(runs[0].run_dir, pooled.encode(pool))
    _show_repeated(session, runs, pool, written, planned=planned, as_json=as_json)
    return exit_code(pool.verdict, pool.lab_state)


def _refuse_mixed_options(folders: Sequence[Path], *, merge: bool, is_sharded: bool, others: bool) -> None:
    """Raise click's usage error if `--shard` or `--merge` is given with an option that it does not fit."""
    if merge != bool(folders) or (merge and is_sharded):
        raise click.UsageError("--merge takes the DIRs of the shards, and no --shard")
    if others:
        raise click.UsageError(
            "--shard and --merge share the runs of --repeat N; give them without --plan, --until-decided, --leave-out "
            "and --control"
        )


def _share(
    session: Session,
    point: Point,
    inventory: Inventory,
    out: Path,
    shard: Shard | None,
    folders: Sequence[Path],
    *,
    as_json: bool,
) -> int:
    """Make the missing runs of a shard, or none (`shard` None: merge `folders`); decide all runs if they are there."""
    made: list[Finished] = []
    if shard is None:
        with session.progress() as progress:
            join(folders, out, [point], progress)
    else:
        done = {run.read_plan().seed for run in find_finished_runs(out, [point]).get(1, ())}
        own = shard_of(shard, point.runs, lambda run: run)
        made = _make_shard([run for run in own if run.plan.seed not in done], inventory, session, out)
    found = find_finished_runs(out, [point]).get(1, [])
    finished = [Finished(run_dir=run, verdict=run.read_verdict(), report=run.report) for run in found]
    if len(finished) == len(point.runs):
        return _pool(session, finished, point.experiment, most=None, planned=len(point.runs), as_json=as_json)
    sentence = f"{len(finished)} of {len(point.runs)} runs are finished in {out}; they are decided when all are"
    if shard is None:
        raise UsageError(f"--merge: {sentence}; give the DIRs of all shards, or run the missing ones")
    own_seeds = {run.plan.seed for run in shard_of(shard, point.runs, lambda run: run)}
    verdicts = {one.verdict.seed: one.verdict for one in (*finished, *made) if one.verdict.seed in own_seeds}
    verdict = worst(one.verdict for one in verdicts.values()) if verdicts.keys() == own_seeds else Verdict.INCONCLUSIVE
    is_dirty = any(one.lab_state == "DIRTY" for one in verdicts.values())
    if as_json:
        session.json({"shard": str(shard), "verdict": verdict, "runs": [one.run_dir.path for one in finished]})
    else:
        session.out.print(f"shard {shard}: {verdict}, the worst of its runs; {sentence}", soft_wrap=True)
    return exit_code(verdict, "DIRTY" if is_dirty else "CLEAN")


def _make_shard(runs: Sequence[ResolvedRun], inventory: Inventory, session: Session, out: Path) -> list[Finished]:
    """Make runs of a shard, and publish each under its key, so that several shards can share a folder."""
    if not runs:
        return []
    is_whole = traits_of(inventory.kind).has_snapshot
    names = () if is_whole else {name for run in runs for name in run_module.touched(run, inventory.topology)}
    made: list[Finished] = []
    with (
        hold(inventory, sorted(names), why=f"run {runs[0].plan.experiment}", mode="exclusive") as holding,
        session.progress(also=holding.heartbeat) as progress,
    ):
        backend_of(inventory.kind).make_ready(inventory, progress)
        for run in runs:
            finished = run_module.execute(run, inventory, out=out, progress=progress, guard=holding.refresh)
            published = publish(finished.run_dir)
            verdict = published.read_verdict()
            made.append(Finished(run_dir=published, verdict=verdict, report=published.report))
            progress(f"seed {verdict.seed}: {verdict.verdict}, lab {verdict.lab_state}")
            if verdict.lab_state == "DIRTY":
                break  # nothing after it could be trusted
    return made


def _most_runs(loaded: Experiment, repeat: int, *, until_decided: bool, most: int | None) -> int | None:
    """Return how many runs `--until-decided` makes at most; None: it was not given."""
    if not until_decided:
        if most is not None:
            raise UsageError("--most needs --until-decided; add it, or give --repeat for a fixed number of runs")
        return None
    if repeat != 1:
        raise UsageError("--repeat makes a fixed number of runs, --until-decided as many as it takes; give one of them")
    if not sampled_bounds(loaded.expectations):
        raise UsageError(f"{loaded.source}: expects nothing that several runs decide together; use --repeat")
    bounds = [bound for item in loaded.expectations for bound in bounds_of(item) if bound.is_sampled]
    have_twins = all(bound.metric.name == TWIN_RATIO for bound in bounds)
    planned, tail = most or (_MOST if have_twins else _MOST_WITHOUT_TWIN), tail_for(len(bounds))
    if not any(pooled.planned_looks(bound, planned, tail) for bound in bounds):
        fewest = sequential_looks.fewest_runs(tail, worth=1.0 if have_twins else WORTH)
        raise UsageError(
            f"--most {planned}: so few runs never decide {bounds[0].metric.name}; give {fewest} or more, "
            "or use --repeat"
        )
    return planned


def _trial(run: Finished, loaded: Experiment) -> pooled.Trial:
    return trial_of(run.run_dir, run.verdict, loaded.expectations)


def _resolve_each(
    loaded: Experiment,
    source: bytes,
    inventory: Inventory,
    seeds: Iterable[int | None],
    left_out: Sequence[ExcludedHost],
) -> list[ResolvedRun]:
    """Return a plan for each seed. An error lists the excluded hosts."""
    try:
        return [run_module.resolve(loaded, source, inventory, seed=seed, left_out=left_out) for seed in seeds]
    except (Unsupported, UsageError) as error:
        if not left_out:
            raise
        without = ", ".join(f"{exclusion.host} ({exclusion.why})" for exclusion in left_out)
        kind = Unsupported if isinstance(error, Unsupported) else UsageError
        raise kind(f"{error}; left out: {without}") from None


def _refuse_drained_spares(session: Session, resolved: ResolvedRun, inventory: Inventory, runs: Path) -> None:
    """Refuse a job whose spare is on a host that the offenders of earlier runs list for drain or RMA.

    A lab with a snapshot is exempt: every run starts from it, so an earlier run says nothing about a host.

    Raises:
        ConfigError: a restart would move a rank to such a host.
    """
    workload = resolved.experiment.workload
    resilience = workload.resilience if isinstance(workload, Job) else None
    if resilience is None or not resilience.spares or traits_of(inventory.kind).has_snapshot:
        return
    drained = drained_hosts(session, inventory, runs)
    for spare in resilience.spares:
        if (offender := drained.get(spare.partition(":")[0])) is not None:
            raise ConfigError(
                f"{resolved.experiment.at('workload.resilience.spares')}: {spare} is on a host to drain "
                f"({offender.action}: {offender.causes[0]} at {offender.name}); name another spare or, "
                f"if the host was repaired, move the runs from before the repair out of {runs} "
                f"(`faultbed offenders --runs {runs}` lists them)"
            )


def _execute_all(
    trials: Sequence[ResolvedRun],
    inventory: Inventory,
    out: Path,
    progress: run_module.Progress,
    holding: LabLease,
    *,
    most: int | None,
    control: bool,
) -> list[Finished]:
    """Execute the runs, one after the other; with `most`, until all of them together decide."""
    made = (
        run_module.execute(trial, inventory, out=out, progress=progress, guard=holding.refresh, control=control)
        for trial in trials
    )
    return _in_turn(made, trials, progress, most=most)


def _in_turn(
    made: Iterable[Finished], trials: Sequence[ResolvedRun], progress: run_module.Progress, *, most: int | None
) -> list[Finished]:
    """Take the runs of some trials, in their order, as they are made; with `most`, until all together decide."""
    runs: list[Finished] = []
    pool: list[pooled.Trial] = []
    for trial, run in zip(trials, made, strict=False):
        runs.append(run)
        verdict = run.verdict
        if len(trials) > 1:
            progress(
                f"run {len(runs)} of {len(trials)}, seed {verdict.seed}: {verdict.verdict}, lab {verdict.lab_state}"
            )
        if verdict.lab_state == "DIRTY":
            break  # nothing after it could be trusted
        if most is None:
            continue
        pool.append(_trial(runs[-1], trial.experiment))
        pooled_file = pooled.pool(pool, trial.experiment.expectations, most=most)
        progress(f"after {len(runs)} runs: {pooled_file.verdict}{_open_checks(pooled_file)}")
        if not pooled.is_open(pooled_file):
            break
    return runs


def _run_on(
    place: Place,
    trials: Sequence[ResolvedRun],
    inventory: Inventory,
    out: Path,
    session: Session,
    *,
    most: int | None,
) -> list[Finished]:
    """Make the runs on several labs at a time; with `most`, until those with the first seeds decide."""
    with extra("scale", "--on"):
        from faultbed.harness.run.workers.open_pool import open_pool  # noqa: PLC0415 - an optional package
    with (
        session.progress() as progress,
        open_pool(place, inventory=inventory.path, runs=out, progress=progress) as workers,
        contextlib.closing(made_by(workers, trials, inventory, out)) as made,
    ):
        return _in_turn(made, trials, progress, most=most)


def _refuse_workers(place: Place | None, inventory: Inventory, *, is_single: bool, others: bool) -> None:
    """Refuse `--on` where there is nothing to share, or with an option that it does not fit."""
    if place is None:
        return
    if is_single:
        raise UsageError(f"--on {place}: one run has nothing to share; add --repeat or --until-decided")
    if others:
        raise click.UsageError(
            "--on makes the runs on labs of its own; give it without --shard, --merge, --plan, --leave-out, --control, "
            "--no-up and --down"
        )
    if not traits_of(inventory.kind).has_snapshot:
        raise UsageError(f"--on {place}: {inventory.name} has machines of its own; use --shard with more labs")


@click.command()
@click.argument("run_dirs", nargs=-1, required=True, type=click.Path(file_okay=False, path_type=Path))
@click.option("--compare", is_flag=True, help="Compare the second of two runs with the first, with intervals.")
@click.option(
    "--judge",
    "judge_again",
    is_flag=True,
    help="Judge the run again, from plan.json and what it recorded, and write its ledger and verdict.",
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Path of the comparison page. Default: compare-with-<A>.html in B's directory.",
)
@json_option
@pass_session
def report(
    session: Session,
    *,
    run_dirs: tuple[Path, ...],
    compare: bool,
    judge_again: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    """Render the report of a finished run again from its directory, and print its verdict.

    With --compare, RUN_DIRS are two runs, A and B, of one experiment with one seed. The differences of B are printed,
    and drawn on one page (an HTML file that works offline).
    """
    if compare:
        if len(run_dirs) != PAIR or judge_again:
            raise click.UsageError("--compare takes two run directories, A and B, and no --judge")
        show_comparison(session, *run_dirs, html=html, as_json=as_json)
        return
    if html is not None:
        raise click.UsageError(
            "--html is the page of a comparison; the report of one run is written into its directory"
        )
    if len(run_dirs) != 1:
        raise click.UsageError("one run directory, or two with --compare")
    directory = rundir.open_run(run_dirs[0])
    verdict = _judged_again(session, directory) if judge_again else directory.read_verdict()
    # matplotlib takes a second to import, and most commands draw nothing.
    from faultbed.harness.report import run_page as report_module  # noqa: PLC0415

    _show(
        session,
        Finished(run_dir=directory, verdict=verdict, report=report_module.render(directory.path)),
        as_json=as_json,
    )


def _judged_again(session: Session, directory: RunDir) -> VerdictFile:
    """Judge a run from its files, write its ledger and verdict, and return the verdict."""
    judged, before = judge_run(directory), directory.path / "verdict.json"
    content = verdict_file.encode(judged.verdict)
    is_same = before.exists() and before.read_bytes() == content
    try:
        directory.write_ledger(judged.ledger)
        directory.write_verdict(judged.verdict)
    except OSError as error:
        raise UsageError(f"{directory.path}: {error.strerror or error}; copy the run to a writable folder") from error
    again = "the same verdict.json" if is_same else "verdict.json is another one now"
    session.err.print(f"judged again: {again}", soft_wrap=True)
    return judged.verdict


def _open_checks(pooled_file: pooled.PooledFile) -> str:
    still = [check for check in pooled_file.checks if check.verdict is Verdict.INCONCLUSIVE]
    return "".join(f"; {check.name}: {check.detail}" for check in still[:1])


def _show_repeated(
    session: Session,
    runs: Sequence[Finished],
    pool: pooled.PooledFile,
    written: Path,
    *,
    planned: int | None,
    as_json: bool,
) -> None:
    checks_over_runs = repeated.repeated_checks([finished.verdict for finished in runs])
    if as_json:
        done = [
            {
                "seed": finished.verdict.seed,
                "verdict": finished.verdict.verdict,
                "lab_state": finished.verdict.lab_state,
                "run_dir": finished.run_dir.path,
            }
            for finished in runs
        ]
        checks = [{**msgspec.to_builtins(check), "median": check.median} for check in checks_over_runs]
        session.json(
            {"runs": done, "checks": checks, "pooled": {**msgspec.to_builtins(pool), "file": written}},
        )
        return
    session.table(
        ("seed", "", "run"),
        [
            (str(finished.verdict.seed), _marked(finished.verdict.verdict), str(finished.run_dir.path))
            for finished in runs
        ],
    )
    session.out.print()
    session.table(
        ("check", "passed", "of all runs", "observed: median", "lowest .. highest", "bound"),
        [
            (
                check.name,
                f"{check.verdicts[Verdict.PASS]} of {len(runs)}",
                f"{check.passed.low:.0%} .. {check.passed.high:.0%}",
                _with_interval(check.median, check.middle, check.unit),
                " .. ".join(summary.format_value(end(check.values), check.unit) for end in (min, max) if check.values),
                " .. ".join(_ends(check.bounds, check.unit)),
            )
            for check in checks_over_runs
        ],
    )
    session.out.print(f"\nshares and medians with {repeated.LEVEL:.0%} intervals: exact binomial, order statistics")
    if planned is not None and len(runs) < planned:
        session.out.print(f"ended after {len(runs)} of {planned}: the lab is DIRTY, `faultbed reset` restores it")
    session.out.print()
    _show_pool(session, pool)
    session.out.print(f"written to {written}", soft_wrap=True)


def _show_pool(session: Session, pool: pooled.PooledFile) -> None:
    session.table(
        ("", "all runs together", "observed", "bound", "why"),
        [
            (
                _marked(check.verdict),
                check.name,
                summary.format_observed(check),
                _bound(check),
                check.detail,
            )
            for check in pool.checks
        ],
    )
    for run in pool.runs:
        if run.left_out is not None:
            session.out.print(f"seed {run.seed} is left out: {run.left_out}", soft_wrap=True)
    headline = Text.assemble((str(pool.verdict), f"bold {COLOURS[pool.verdict]}"), f"  {len(pool.runs)} runs together")
    session.out.print(headline)


def _bound(check: Check) -> str:
    if check.bound is None:
        return ""
    return f"{summary.format_comparison(check)}{summary.format_value(check.bound, check.unit)}"


def _ends(bounds: Sequence[float | int | str | None], unit: str) -> list[str]:
    """Return the lowest and the highest bound of several runs, or all of them if they are no numbers."""
    known = [bound for bound in bounds if bound is not None]
    numbers = [bound for bound in known if not isinstance(bound, str)]
    ends = sorted({min(numbers), max(numbers)}) if len(numbers) == len(known) > 0 else known
    return [summary.format_value(end, unit) for end in ends]


def _with_interval(median: float | None, interval: Interval | None, unit: str) -> str:
    if median is None:
        return ""
    text = summary.format_value(median, unit)
    if interval is None:
        return text
    return f"{text} ({summary.format_value(interval.low, unit)} .. {summary.format_value(interval.high, unit)})"


def _marked(verdict: Verdict) -> Text:
    return styled(str(verdict), COLOURS[verdict])


def _show_plan(session: Session, resolved: ResolvedRun, *, as_json: bool) -> None:
    if as_json:
        session.out.print(plan_module.encode(resolved.plan).decode(), end="", soft_wrap=True)
        return
    words = f", seed {resolved.plan.seed}: nothing is done yet"
    session.out.print(Text.assemble((resolved.plan.experiment, "bold"), words))
    for part in PARTS:
        for line in part.says(resolved.experiment):
            session.out.print(line)
    for fault in resolved.faults:
        session.out.print(
            Text.assemble(
                (f"\n{fault.spec.at_s:.3f} s", "bold"),
                f"  {fault.kind} on {fault.target.text} for {fault.spec.for_s:g} s ({fault.fidelity})",
            )
        )
        session.table(
            ("do", "revert"), [(step.do, step.undo) for option in fault.options for step in option.mechanism.steps]
        )


def _show(session: Session, finished: Finished, *, as_json: bool) -> None:
    verdict = finished.verdict
    if as_json:
        session.json({**msgspec.to_builtins(verdict), "run_dir": finished.run_dir.path, "report": finished.report})
        return
    measured = finished.run_dir.read_run()
    rows = [
        (
            _marked(check.verdict),
            check.name,
            summary.format_observed(check),
            _bound(check),
            "" if check.verdict is Verdict.PASS else undecided.first_reason(check.detail),
        )
        for check in verdict.checks
    ]
    session.table(("", "check", "observed", "bound", "why"), rows)
    session.out.print()
    if lines := undecided.explain(verdict, measured.workload.load):
        session.out.print(Text(str(verdict.verdict), style=f"bold {COLOURS[verdict.verdict]}"))
        for line in lines:
            session.out.print(line, soft_wrap=True)
        session.out.print(f"lab {verdict.lab_state}; report {finished.report}", soft_wrap=True)
        return
    observed = judge.observed_of(measured, finished.run_dir.read_evidence(judge.KINDS))
    session.out.print(
        Text.assemble(
            (str(verdict.verdict), f"bold {COLOURS[verdict.verdict]}"),
            f"  {summary.sentence(verdict, measured, observed)}",
        ),
        soft_wrap=True,
    )
    if note := judged_by(finished.run_dir.read_environment(), rundir.describe_environment()):
        session.out.print(note, soft_wrap=True)
    session.out.print(f"lab {verdict.lab_state}; report {finished.report}", soft_wrap=True)


COMMANDS = (run, report)
