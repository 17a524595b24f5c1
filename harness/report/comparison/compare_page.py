"""The page of a comparison: two finished runs in one HTML file that works offline, from their directories alone.

Nothing is measured here: `faultbed.harness.report.comparison.compare` computes the numbers, and
`faultbed.harness.report.comparison.compared_runs` pairs the items of both runs. Layout and rules are those of the
report of one run (`faultbed.harness.report.page`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faultbed.harness import judge
from faultbed.harness.analysis.links import link_load
from faultbed.harness.analysis.links.link_load import Fan, Layer, LinkLoad
from faultbed.harness.record.rundir import RunDir
from faultbed.harness.report import page, summary
from faultbed.harness.report.comparison import compare_plots, compared_runs, differences, forest
from faultbed.harness.report.comparison.compare import Row
from faultbed.harness.report.comparison.compared_runs import RecoveryPair, Side
from faultbed.harness.report.plots import fault_bands
from faultbed.harness.report.plots.recovery_bars import PhaseBar
from faultbed.harness.verdict import VerdictFile
from faultbed.testbed.errors import UsageError

__all__ = ["default_path", "render", "render_html"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loads:
    """The links of one run; `most` is the largest number of bytes that a link carried in one direction."""

    most: int
    layers: tuple[Layer, ...]
    fans: tuple[Fan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecoveryView:
    """A fault's recoveries with its number and colour."""

    number: int
    colour: str
    pair: RecoveryPair
    what: str
    phases: tuple[tuple[str, PhaseBar | None, PhaseBar | None], ...]
    bounded: bool


def default_path(run_a: RunDir, run_b: RunDir) -> Path:
    """Return the default location of the page: in B's directory, named after A."""
    return run_b.path / f"compare-with-{run_a.path.resolve().name}.html"


def render(run_a: RunDir, run_b: RunDir, rows: Sequence[Row], out: Path) -> Path:
    """Write the page to `out` and return it; `rows` are those of `faultbed.harness.report.comparison.compare`.

    Raises:
        UsageError: a file of one of the runs cannot be read, or `out` is not writable.
    """
    html = render_html(run_a, run_b, rows)
    try:
        out.write_text(html, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{out}: {error.strerror or error}; choose another place with --html") from error
    return out


def render_html(run_a: RunDir, run_b: RunDir, rows: Sequence[Row]) -> str:
    """Return the page as text."""
    side_a, side_b = _side("A", run_a), _side("B", run_b)
    checks = compared_runs.check_pairs(side_a.verdict.checks, side_b.verdict.checks)
    decided = [row for row in rows if row.interval is not None]
    rest = [row for row in rows if row.interval is None]
    return (
        page.environment()
        .get_template("compare.html.j2")
        .render(
            sides=(side_a, side_b),
            a=side_a,
            b=side_b,
            headline=compared_runs.headline(rows),
            sentence=compared_runs.describe(side_a, side_b, rows, checks),
            workload=summary.describe_workload(side_a.run),
            facts=_facts(side_a, side_b, rows, checks),
            plans=differences.of_plans(side_a.plan, side_b.plan),
            labs=differences.of_labs(side_a.run, side_b.run),
            environments=differences.of_environments(run_a.read_environment(), run_b.read_environment()),
            unlike_lines=compared_runs.unlike_lines(side_a, side_b),
            decided=forest.forest(decided),
            once=forest.forest(rest),
            bare=[row for row in rest if row.ratio is None],
            floored=any(row.own != row.interval for row in rows),
            goodput=page.markup(compare_plots.goodput_chart(side_a, side_b)),
            aligned=compare_plots.aligned(side_a, side_b),
            recoveries=_recoveries(side_a, side_b),
            checks=checks,
            **_loads(side_a, side_b),
        )
    )


def _side(letter: str, run: RunDir) -> Side:
    measured = run.read_run()
    return Side(
        letter=letter,
        name=run.path.resolve().name,
        run=measured,
        observed=judge.observed_of(measured, run.read_evidence(judge.KINDS)),
        verdict=run.read_verdict(),
        plan=run.read_plan(),
        experiment=run.read_experiment().decode(errors="replace"),
    )


def _facts(
    side_a: Side, side_b: Side, rows: Sequence[Row], checks: Sequence[compared_runs.CheckPair]
) -> list[tuple[str, str, str]]:
    """Return the tiles under the headline: (name, value, origin)."""
    tiles = [
        (
            "verdict, A then B",
            f"{side_a.verdict.verdict} → {side_b.verdict.verdict}",
            _states(side_a.verdict, side_b.verdict),
        )
    ]
    by_name = {row.metric: row for row in rows}
    for name, label in (("job time", "job time, B over A"), ("goodput.mean", "mean goodput, B over A")):
        row = by_name.get(name)
        if row is not None and row.ratio is not None:
            interval_text = (
                "no interval" if row.interval is None else f"{row.interval.low:.3f} to {row.interval.high:.3f}"
            )
            tiles.append((label, f"{row.ratio:.3f}", f"{interval_text}: {row.says}"))
    for name, label in (("recovery.total", "worst recovery, A then B"), ("dip", "deepest dip, A then B")):
        row = by_name.get(name)
        if row is not None:
            values = (summary.format_value(value, row.unit) for value in (row.a, row.b))
            tiles.append((label, " → ".join(values), "once in each run" if row.interval is None else row.says))
    changed = sum(pair.changed for pair in checks)
    tiles.append(("checks that differ", f"{changed} of {len(checks)}", "from both verdict.json"))
    return tiles


def _states(verdict_a: VerdictFile, verdict_b: VerdictFile) -> str:
    return f"lab afterwards {verdict_a.lab_state} and {verdict_b.lab_state}"


def _recoveries(side_a: Side, side_b: Side) -> list[_RecoveryView]:
    views = []
    for index, pair in enumerate(compared_runs.recovery_pairs(side_a, side_b)):
        fault = pair.a.fault or pair.b.fault
        if fault is None:
            continue
        views.append(
            _RecoveryView(
                number=index + 1,
                colour=fault_bands.colour(fault, index),
                pair=pair,
                what=f"{fault.plan.kind} on {fault.target_text}",
                phases=pair.phases,
                bounded=any(
                    phase_bar is not None and phase_bar.bound_s is not None
                    for _, *phase_bars_of_sides in pair.phases
                    for phase_bar in phase_bars_of_sides
                ),
            )
        )
    return views


def _loads(side_a: Side, side_b: Side) -> Mapping[str, Any]:
    """Return the data of the table of links."""
    loads_of_sides = [link_load.link_loads(side.run) for side in (side_a, side_b)]
    loads = [
        _Loads(
            most=max(
                (direction.size_bytes or 0 for load in side_loads for direction in (load.up, load.down)), default=0
            ),
            layers=link_load.layers(side_loads, side.run.lab.topology),
            fans=link_load.fans(side_loads, side.run.lab.topology),
        )
        for side, side_loads in zip((side_a, side_b), loads_of_sides, strict=True)
    ]
    return {"loads": loads, "load_pairs": compared_runs.load_pairs(*_as_two(loads_of_sides))}


def _as_two(pair: Sequence[Sequence[LinkLoad]]) -> tuple[Sequence[LinkLoad], Sequence[LinkLoad]]:
    first, second = pair
    return first, second
