"""Repeat offenders: `faultbed offenders`."""

from __future__ import annotations

import dataclasses
import json
import shlex
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
from rich.text import Text

from faultbed.harness.attribution.gpu_readings import CLOCK_ERROR, GpuReading, readings_of_preflight, readings_of_run
from faultbed.harness.attribution.offenders import (
    Offender,
    Strike,
    Thresholds,
    offenders,
    strikes_of_preflight,
    strikes_of_run,
)
from faultbed.harness.cli.context import Session, json_option, pass_session, styled
from faultbed.harness.cli.options.numbers import FiniteRange
from faultbed.harness.record.copies import digest_of
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.record.rundir import RunDir, find_run_folders, open_run
from faultbed.harness.verdict import Verdict, VerdictFile
from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.suggestions import first_of
from faultbed.testbed.units import parse_duration_ns

__all__ = ["COMMANDS", "drained_hosts"]

_COLOURS = {"RMA": "red", "drain": "yellow", "watch": "dim"}
_PROGRESS_S = 2.0
_HAND_OVERS = ("slurm", "kubernetes", "hostfile")


@click.command("offenders")
@click.option(
    "--runs",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Run directories.",
)
@click.option(
    "--preflight",
    "preflights",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file that `faultbed preflight --out` has written; repeatable.",
)
@click.option("--drain", default=1.5, show_default=True, type=FiniteRange(0.01), help="Drain from this score on.")
@click.option(
    "--rma", default=3.0, show_default=True, type=FiniteRange(0.01), help="Score from which a part is sent to repair."
)
@click.option("--half-life", default="7d", show_default=True, help="Time after which a strike counts half.")
@click.option(
    "--drills",
    is_flag=True,
    help="Also count runs with injected faults, less what those explain.",
)
@click.option(
    "--rehearse",
    is_flag=True,
    help="Count findings in runs with injected faults as real, to rehearse the reaction to an error.",
)
@click.option(
    "--hand-over",
    type=click.Choice(_HAND_OVERS),
    help="Print a scheduler's drain commands, and run nothing.",
)
@json_option
@pass_session
def offenders_command(
    session: Session,
    *,
    runs: Path,
    preflights: tuple[Path, ...],
    drain: float,
    rma: float,
    half_life: str,
    drills: bool,
    rehearse: bool,
    hand_over: str | None,
    as_json: bool,
) -> None:
    """List parts that runs and preflights blame repeatedly: watch, drain or send to repair (RMA).

    A strike is one confident finding of a run without injected faults, or one wrong result of a preflight. Its weight
    halves with --half-life. RMA needs strikes on different days, as many as --rma rounded down. A run does not blame
    hosts without a rank, and one that ended in ERROR blames nothing. A GPU whose newest reading has reached a threshold
    (docs/gpu-thresholds.md) is drained or sent to repair at once, however that run ended.
    """
    if rehearse and hand_over:
        raise UsageError(
            "--rehearse: a rehearsal has nothing to hand over, because faultbed itself broke what it lists; "
            "leave out --hand-over"
        )
    topology = session.inventory().topology
    thresholds = Thresholds(drain=drain, rma=rma, half_life=_duration(half_life))
    lab = session.inventory().name
    files = tuple({path.resolve(): path for path in preflights}.values())  # a file named twice is one preflight
    counts = dict.fromkeys(("runs", "drills", "errors", "other_labs", "other_preflights", "copies", "unreadable"), 0)
    counts["preflights"] = len(files)
    if not runs.is_dir() and not preflights:
        raise UsageError(f"--runs {runs}: no such folder; name the one that `faultbed run --out` wrote to")
    strikes, readings = _blame_of_runs(session, lab, runs, counts, drills=drills, rehearsal=rehearse)
    for path, content in _preflights_of(lab, files, counts):
        strikes += strikes_of_preflight(content, origin=path.name, at=_written(path, content))
        readings += readings_of_preflight(content, topology, origin=path.name, at=_written(path, content))
    ranking = offenders(strikes, topology, thresholds, now=datetime.now(UTC), readings=readings)
    if hand_over:
        _print_hand_over(session, hand_over, ranking, topology, as_json=as_json)
        return
    if as_json:
        listed = [_plain(offender) for offender in ranking]
        session.json(
            {**counts, "rehearsal": rehearse, "dated_in_the_future": _from_the_future(ranking), "offenders": listed}
        )
        return
    _show(session, ranking, counts, drills=drills or rehearse)
    if rehearse:
        warning = "a rehearsal: injected faults count as if they were real; drain nothing because of this list"
        session.out.print(Text(warning, style="yellow"), soft_wrap=True)


def drained_hosts(session: Session, inventory: Inventory, runs: Path) -> dict[str, Offender]:
    """Return the hosts that `faultbed offenders --runs RUNS` lists for drain or RMA, with the severest offender."""
    counts = dict.fromkeys(("runs", "drills", "errors", "other_labs", "copies"), 0)
    strikes, readings = _blame_of_runs(session, inventory.name, runs, counts)
    return _to_drain(offenders(strikes, inventory.topology, Thresholds(), now=datetime.now(UTC), readings=readings))


def _blame_of_runs(
    session: Session, lab: str, runs: Path, counts: dict[str, int], *, drills: bool = False, rehearsal: bool = False
) -> tuple[list[Strike], list[GpuReading]]:
    """Return the strikes and the readings of GPUs of a lab's runs, and count the runs as `_runs_of` does."""
    strikes: list[Strike] = []
    readings: list[GpuReading] = []
    for directory, verdict, measured in _runs_of(session, lab, runs, counts):
        at, name = directory.started, directory.path.name
        strikes += strikes_of_run(measured, verdict, origin=name, at=at, drills=drills, rehearsal=rehearsal)
        readings += readings_of_run(measured, origin=name, at=at, drills=drills, rehearsal=rehearsal)
    return strikes, readings


def _runs_of(
    session: Session, lab: str, runs: Path, counts: dict[str, int]
) -> Iterator[tuple[RunDir, VerdictFile, RunEvidence]]:
    """Yield the runs of a lab, oldest first, and count them, those of other labs, and copies.

    Raises:
        UsageError: a run cannot be read, and `counts` has no place for those that are left out.
    """
    known: set[str] = set()
    with session.progress() as progress:
        due = time.monotonic() + _PROGRESS_S
        for number, path in enumerate(_run_directories(runs)):
            if time.monotonic() > due:
                progress(f"offenders: {number} runs read")
                due += _PROGRESS_S
            try:
                directory = open_run(path)
                verdict = directory.read_verdict()
                if verdict.lab != lab:
                    counts["other_labs"] += 1
                    continue
                measured = directory.read_run()
            except UsageError as error:  # one damaged file must not hide what all others blame
                if "unreadable" not in counts:
                    raise
                counts["unreadable"] += 1
                session.err.print(f"{path.name} is left out: {error}", soft_wrap=True)
                continue
            if (digest := digest_of(measured)) in known:
                counts["copies"] += 1
                continue
            known.add(digest)
            counts["runs"] += 1
            counts["drills"] += bool(measured.injected.faults)
            counts["errors"] += verdict.verdict is Verdict.ERROR
            yield directory, verdict, measured


def _run_directories(runs: Path) -> Iterator[Path]:
    """Yield finished runs at any depth, oldest first. A run without a verdict is unfinished, and is left out.

    Raises:
        UsageError: a folder cannot be read: leaving its runs out would clear their hosts.
    """

    def refuse(error: OSError) -> None:
        raise UsageError(f"{error.filename}: {error.strerror}; make it readable, or choose another --runs")

    yield from (folder for folder in find_run_folders(runs, refuse) if (folder / "verdict.json").exists())


def _preflights_of(lab: str, files: Sequence[Path], counts: dict[str, int]) -> Iterator[tuple[Path, object]]:
    """Yield the contents of the preflights of a lab, and count those of other labs and copies."""
    known: list[object] = []
    for path in files:
        content = _decoded(path)
        if isinstance(content, dict) and content.get("lab", lab) != lab:
            counts["other_preflights"] += 1
            counts["preflights"] -= 1
        elif (
            isinstance(content, dict) and "at" in content and content in known
        ):  # a copy: the same time and the same results
            counts["copies"] += 1
            counts["preflights"] -= 1
        else:
            known.append(content)
            yield path, content


def _written(path: Path, content: object) -> datetime:
    """Return when a preflight was written: what it says, or else the time of its file, which a copy renews."""
    stamp = content.get("at") if isinstance(content, dict) else None
    if stamp is None:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC)
    try:
        at = datetime.fromisoformat(str(stamp))
        known = None if at.tzinfo is None else at.astimezone(UTC)
    except (ValueError, OverflowError):
        known = None
    if known is None:
        raise UsageError(
            f"--preflight {path}: at: {stamp!r} is no time with a zone; give a file that --out has written"
        )
    return known


def _decoded(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--preflight {path}: cannot be read: {error}; give a file that --out has written") from error


def _duration(text: str) -> timedelta:
    try:
        return timedelta(microseconds=parse_duration_ns(text) / 1000)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"--half-life {text}: {error}; write 12h or 7d") from error


def _print_hand_over(
    session: Session, form: str, ranking: Sequence[Offender], topology: Topology, *, as_json: bool
) -> None:
    """Print a scheduler's commands; notes go to stderr, so that the output can be piped."""
    lines = list(_handed_over(form, ranking, topology))
    if as_json:
        session.json(lines)
    else:
        click.echo("\n".join(lines))
        if not lines and form == "hostfile":
            session.err.print("no host is left for the file: each has to be drained")
    if late := _from_the_future(ranking):
        session.err.print(Text(_future_note(late), style="yellow"), soft_wrap=True)


def _handed_over(form: str, ranking: Sequence[Offender], topology: Topology) -> Iterator[str]:
    """Yield the lines for a scheduler: drained hosts, or the hosts that remain."""
    drained = _to_drain(ranking)
    if form == "hostfile":
        yield from (host.name for host in topology.hosts if host.name not in drained)
        return
    for host, offender in drained.items():
        why = f"faultbed: {offender.causes[0]} at {offender.name}, score {offender.score:.1f}"
        if form == "slurm":
            yield shlex.join(["scontrol", "update", f"NodeName={host}", "State=DRAIN", f"Reason={why}"])
        else:
            yield shlex.join(["kubectl", "taint", "nodes", host, f"faultbed.io/offender={offender.action}:NoSchedule"])


def _to_drain(ranking: Sequence[Offender]) -> dict[str, Offender]:
    """Return the hosts to drain, each with its severest offender."""
    drained: dict[str, Offender] = {}
    for offender in ranking:
        if offender.action != "watch" and offender.host:
            drained.setdefault(offender.host, offender)
    return drained


def _plain(offender: Offender) -> dict[str, object]:
    fields = {**dataclasses.asdict(offender), "last": offender.last.isoformat()}
    fields["strikes"] = [{**strike, "at": strike["at"].isoformat()} for strike in fields["strikes"]]
    return fields


def _show(session: Session, ranking: Sequence[Offender], counts: dict[str, int], *, drills: bool) -> None:
    left_out = 0 if drills else counts["drills"]
    counted = f"{_count(counts['runs'] - left_out, 'run')} and {_count(counts['preflights'], 'preflight')}"
    if ranking:
        rows = [
            (
                offender.name,
                str(len(offender.strikes)),
                f"{offender.score:.2f}",
                ", ".join(offender.causes),
                f"{offender.last:%Y-%m-%d %H:%M}",
                styled(offender.action, _COLOURS[offender.action]),
            )
            for offender in ranking
        ]
        session.table(("what", "strikes", "score", "causes", "last (UTC)", "do"), rows)
    session.out.print(f"{counted}: {_count(len(ranking), 'place')} blamed", soft_wrap=True)
    if counts["copies"]:
        copies = f"{counts['copies']} {'copy' if counts['copies'] == 1 else 'copies'}"
        session.out.print(Text(f"left out: {copies}", style="dim"))
    for counter, noun in (("other_labs", "run"), ("other_preflights", "preflight")):
        if counts[counter]:
            session.out.print(Text(f"left out: {_count(counts[counter], noun)} of other labs", style="dim"))
    if counts["errors"]:
        runs = _count(counts["errors"], "run")
        note = f"left out: findings of {runs} that ended in ERROR; what their GPUs reported counts"
        session.out.print(Text(note, style="dim"), soft_wrap=True)
    if late := _from_the_future(ranking):
        session.out.print(Text(_future_note(late), style="yellow"), soft_wrap=True)
    if left_out:
        drill = _count(left_out, "run")
        note = f"left out: {drill} with injected faults; --drills counts what those faults do not explain"
        session.out.print(Text(note, style="dim"), soft_wrap=True)


def _from_the_future(ranking: Sequence[Offender]) -> list[str]:
    """Return the runs and preflights of strikes that a machine with a wrong clock has dated."""
    latest = datetime.now(UTC) + CLOCK_ERROR
    return sorted({strike.origin for offender in ranking for strike in offender.strikes if strike.at > latest})


def _future_note(origins: Sequence[str]) -> str:
    return (
        f"dated in the future, so their strikes count as of today and do not decay: {first_of(origins, 3)}; "
        "correct these dates"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


COMMANDS = (offenders_command,)
