"""The report of a run: one HTML file that works offline, rendered from the run directory alone.

Nothing is measured here. Every number comes from `evidence/`, `verdict.json`, `plan.json` or
`environment.json`, through the same functions that the judge used. The page names their version, and says so if another
version judged the run. The template escapes everything from those files. Only the drawing and the charts, which escape
their own text, are inserted as markup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from faultbed.harness import judge
from faultbed.harness.analysis import probe_lines
from faultbed.harness.analysis.links import expected_load, link_load
from faultbed.harness.analysis.observe import Observed
from faultbed.harness.analysis.prediction import predictions
from faultbed.harness.analysis.ranks.slow_ranks import slow_ranks
from faultbed.harness.analysis.timeline import Impact
from faultbed.harness.attribution import packet_stalls
from faultbed.harness.attribution.attribute import attribute
from faultbed.harness.attribution.stalls import Stall, stalls
from faultbed.harness.experiment.metrics import METRICS, lookup
from faultbed.harness.experiment.run_plan import Plan
from faultbed.harness.findings import Attribution
from faultbed.harness.model import calibration
from faultbed.harness.model.calibration import Calibration
from faultbed.harness.packets.evidence import Evidence
from faultbed.harness.proof import why_unproven_in
from faultbed.harness.record.evidence import run_evidence
from faultbed.harness.record.evidence.fault_evidence import FaultRun
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.harness.record.evidence.telemetry_evidence import counter_deltas
from faultbed.harness.record.evidence.workload_evidence import connection_between
from faultbed.harness.record.rundir import RunDir, describe_environment, open_run
from faultbed.harness.report import page, summary, undecided
from faultbed.harness.report.fabric import drawing_states, fabric_states
from faultbed.harness.report.fabric.drawing import Mark, fabric_svg
from faultbed.harness.report.judged_by import judged_by
from faultbed.harness.report.plots import (
    counter_plot,
    counter_timeline,
    fault_bands,
    gantt_plot,
    goodput_plot,
    probe_plot,
    step_gantt,
)
from faultbed.harness.report.plots.charts import Band
from faultbed.harness.report.plots.recovery_bars import (
    PhaseBar,
    RecoveryBar,
    phase_bars,
    reach_ns,
    recovery_bar,
    recovery_check,
)
from faultbed.harness.report.plots.restart_bars import restart_bars
from faultbed.harness.verdict import VerdictFile
from faultbed.inject.evidence.receipt import Receipt
from faultbed.testbed.directories import lab_dir
from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.testbed.observe.telemetry import Change, Recorded
from faultbed.traffic.engine.flight_recorder import Flight
from faultbed.traffic.probes.results import ProbeTrips

__all__ = ["render", "render_html"]

_FIDELITY = {
    "real": "real cause, real effect",
    "emulated": "real symptom, another cause",
    "modelled": "computed; no packet shows it",
}
_EPISODES = 60
"""Maximum number of retransmission episodes (go-backs) in the table; packets.json has all."""
_MARKED = 40
"""Maximum number of flows with CE marks in the table; packets.json has all."""
_MOST_LOST = 40
"""Number of queue pairs in the table: a partitioned fabric loses hundreds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FaultView:
    """One fault as shown on the page."""

    number: int
    colour: str
    run: FaultRun
    receipt: Receipt | None
    reasons: tuple[str, ...]
    """Why the fault is not proven; empty if it is."""
    impact: Impact | None
    band: Band | None
    fidelity_means: str
    bar: RecoveryBar
    phases: tuple[PhaseBar, ...]


_RAW_FILES = (
    "experiment.toml",
    "plan.json",
    "verdict.json",
    "ledger.json",
    "journal.jsonl",
    *(f"evidence/measured/{name}.json" for name in run_evidence.ALWAYS),
    "samples.parquet",
    "telemetry.parquet",
    "environment.json",
    "repro.sh",
)
"""Files of a run directory that its report links to, beside it."""


def render(run_dir: Path) -> Path:
    """Write `report.html` into a run directory and return its path.

    Raises:
        UsageError: the directory is not that of a finished run, its files cannot be read, or it is not writable.
    """
    run = open_run(run_dir)
    html = render_html(run)
    try:
        run.report.write_text(html, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{run.report}: {error.strerror or error}; copy the run to a writable folder") from error
    return run.report


def render_html(run: RunDir) -> str:
    """Return the page as text."""
    verdict, measured = run.read_verdict(), run.read_run()
    plan = run.read_plan()
    run.refuse_mixed(verdict, plan, measured)
    observed = judge.observed_of(measured, run.read_evidence(judge.KINDS))
    flights, packets = run.read_flights(), run.read_packets()
    recorded, environment = run.read_telemetry(), run.read_environment()
    probed = run.read_probes()
    findings = attribute(measured, flights, probed.trips)
    waits = packet_stalls.waits(measured, packets, findings) if packets else ()
    faults = _faults(measured, verdict, observed)
    bands = [fault.band for fault in faults if fault.band is not None]
    marks = [Mark(number=fault.number, colour=fault.colour, target=fault.run.target) for fault in faults]
    html = (
        page.environment()
        .get_template("report.html.j2")
        .render(
            verdict=verdict,
            zoom=page.script("zoom.js"),
            mark=page.MARKS[verdict.verdict],
            headline=summary.headline(verdict),
            undecided=undecided.explain(verdict, measured.workload.load),
            sentence=summary.sentence(verdict, measured, observed),
            started=page.moment(run.started),
            contents_here=page.CONTENTS_HERE,
            files=[name for name in _RAW_FILES if (run.path / name).exists()],
            workload=summary.describe_workload(measured),
            run=measured,
            run_name=run.path.resolve().name,
            plan=plan,
            environment=environment,
            judged_by=judged_by(environment, describe_environment()),
            experiment=run.read_experiment().decode(errors="replace"),
            facts=_facts(measured, observed),
            restarts=restart_bars(observed.restarts, verdict.checks),
            faults=faults,
            fabric=Markup(fabric_svg(measured.lab.topology, marks, measured.workload.connections)),  # noqa: S704 - escaped
            goodput=page.markup(goodput_plot.goodput_chart(measured, observed, bands)),
            **_loads(measured, observed),
            **_over_time(measured, recorded, bands),
            **_probes(measured, probed, bands),
            **_moments(measured, faults, marks, recorded.changes if recorded else measured.telemetry.changes),
            gantts=_gantts(measured, observed, (faults, bands), flights=flights, waits=waits, findings=findings),
            iterations=page.markup(goodput_plot.iterations_chart(measured, bands)),
            cut=_bar_limit_ms(measured),
            kernel=measured.telemetry.kernel,
            most_lost=_MOST_LOST,
            stored=any(
                step.ingest_ns or step.checkpoint_ns for rank in measured.workload.series for step in rank.iterations
            ),
            routed={fault_id: stages for fault_id, stages in observed.routing.items() if stages.changes},
            clock_error_ns=max((machine.clock_error_ns for machine in measured.telemetry.watched), default=0),
            slow_ranks=slow_ranks(measured),
            predictions=predictions(measured, observed, _calibration(measured, plan)),
            findings=findings,
            stalled=[_stall(stall, measured, findings) for stall in stalls(flights)],
            waits=[wait.words for wait in waits],
            observed=observed,
            metrics=_metric_rows(observed),
            counters=_counter_rows(measured),
            quiet=_quiet_counters(measured),
            **_packets(packets, is_emulated=traits_of(measured.lab.kind).is_emulated),
        )
    )
    return page.with_contents(html)


def _calibration(run: RunEvidence, plan: Plan) -> Calibration | None:
    """Return the calibration that is stored for the run's lab now; None: there is none, or it cannot be read."""
    try:
        return calibration.load(lab_dir(run.lab.name), inventory=plan.inventory)
    except UsageError:
        return None


def _moments(
    run: RunEvidence, faults: Sequence[_FaultView], marks: Sequence[Mark], changes: Sequence[Change]
) -> dict[str, Any]:
    """Return the drawings of the fabric at several moments."""
    at_moments = fabric_states.moments(
        run.lab.topology, _windows(run, faults), changes, t0_ns=run.workload.t0_ns, end_ns=run.workload.end_ns
    )
    drawn = [Markup(drawing) for drawing in drawing_states.moments_svg(run.lab.topology, at_moments, marks)]  # noqa: S704 - escaped
    plain = drawing_states.plain_svg(run.lab.topology, run.workload.connections) if at_moments else ""
    return {"moments": list(zip(at_moments, drawn, strict=True)), "plain_fabric": Markup(plain)}  # noqa: S704 - escaped


def _windows(run: RunEvidence, faults: Sequence[_FaultView]) -> list[fabric_states.Window]:
    return [
        fabric_states.Window(
            number=fault.number,
            kind=fault.run.plan.kind,
            target=fault.run.target,
            start_ns=run.workload.t0_ns + round(fault.band.start_s * 1e9),
            end_ns=run.workload.t0_ns + round(fault.band.end_s * 1e9),
        )
        for fault in faults
        if fault.band is not None
    ]


def _gantts(
    run: RunEvidence,
    observed: Observed,
    shown: tuple[Sequence[_FaultView], Sequence[Band]],
    *,
    flights: Sequence[Flight],
    waits: Sequence[packet_stalls.Wait],
    findings: Sequence[Attribution],
) -> list[tuple[step_gantt.Gantt, Mapping[str, Markup] | None]]:
    """Return the charts of steps around each fault."""
    faults, bands = shown
    recovered_ns = {
        fault.number: impact.recovered_ns
        for fault in faults
        if (impact := observed.impacts.get(fault.run.plan.id)) is not None and impact.recovered_ns is not None
    }
    charts = step_gantt.gantts(
        run,
        _windows(run, faults),
        recovered_ns=recovered_ns,
        flights=flights,
        stalled=[(stall, _stall(stall, run, findings)) for stall in stalls(flights)],
        waits=waits,
        findings=findings,
    )
    return [(chart, page.markup(gantt_plot.gantt_chart(chart, bands))) for chart in charts]


def _over_time(measured: RunEvidence, recorded: Recorded | None, bands: Sequence[Band]) -> dict[str, Any]:
    """Return the data of the section about counters and events."""
    if recorded is None:
        return {"telemetry": None}
    inside = {"t0_ns": measured.workload.t0_ns, "end_ns": measured.workload.end_ns}
    series = counter_timeline.series(recorded.samples, **inside)
    event_marks = counter_timeline.event_marks(recorded.changes, **inside)
    sampled = {node: rate for node, rate in _sampled(recorded, measured).items() if rate}
    return {
        "telemetry": page.markup(counter_plot.counters_chart(measured, series, event_marks, bands)) or {},
        "telemetry_series": series,
        "telemetry_shown": counter_timeline.MOST,
        "telemetry_news": event_marks,
        "telemetry_rates": (min(sampled.values()), max(sampled.values())) if sampled else None,
        "telemetry_lost": [machine for machine in measured.telemetry.watched if machine.lost],
    }


def _probes(run: RunEvidence, probe_trips: ProbeTrips, bands: Sequence[Band]) -> dict[str, Any]:
    """Return the data of the section about probes."""
    lines = probe_lines.lines(probe_trips.trips, start_ns=run.workload.t0_ns, end_ns=run.workload.end_ns)
    return {
        "probed": probe_trips if probe_trips.trips or probe_trips.trouble else None,
        "probe_lines": lines,
        "probes": page.markup(probe_plot.probes_chart(run, lines, bands)),
        "probe_window_ns": probe_lines.WINDOW_NS,
        "probe_rows": probe_plot.MOST,
    }


def _loads(run: RunEvidence, observed: Observed) -> dict[str, Any]:
    """Return the data of the table of links."""
    expected = expected_load.expected_loads(run, observed.beside)
    loads = expected_load.with_expected(link_load.link_loads(run), expected)
    return {
        "load_expected": expected,
        "loads": loads,
        "load_most": max(
            (direction.size_bytes or 0 for load in loads for direction in (load.up, load.down)), default=0
        ),
        "load_layers": link_load.layers(loads, run.lab.topology),
        "load_fans": link_load.fans(loads, run.lab.topology),
    }


def _sampled(recorded: Recorded, run: RunEvidence) -> dict[str, float]:
    """Return, by node, samples per second in which a counter had changed, while the workload ran."""
    seconds = max(1e-9, (run.workload.end_ns - run.workload.t0_ns) / 1e9)
    counted = Counter(
        sample.node for sample in recorded.samples if run.workload.t0_ns <= sample.at_ns <= run.workload.end_ns
    )
    return {node: count / seconds for node, count in counted.items()}


def _stall(stall: Stall, run: RunEvidence, findings: Sequence[Attribution]) -> str:
    """Describe a stall, with the path of its connection, or the link on it that lost packets."""
    names = {rank.rank: f"{rank.host}:{rank.rnic}" for rank in run.workload.ranks}
    ends = names.get(stall.sender, ""), names.get(stall.receiver, "")
    connection = connection_between(run.workload, ends, index=stall.connection, qpn=stall.qpn)
    path = connection.path if connection else ()
    links = {link.name: {link.a.node, link.b.node} for link in run.lab.topology.links}
    lost = (finding.name for finding in findings if finding.cause in {"loss", "link-down"} and finding.name in links)
    return stall.describe(path, next((name for name in lost if links[name] <= set(path)), None))


def _packets(evidence: Evidence | None, *, is_emulated: bool) -> dict[str, Any]:
    """Return the data of the section about packets: flows with losses, their episodes by time, flows with marks."""
    if evidence is None:
        return {"packets": None}
    flows = [flow for flow in evidence.analysis.flows if flow.missing or flow.again or flow.broken or flow.reordered]
    episodes = sorted(
        ((flow, episode) for flow in flows for episode in flow.episodes), key=lambda pair: pair[1].resent_ns
    )
    marks = sorted(
        (flow for flow in evidence.analysis.flows if flow.congestion is not None),
        key=lambda flow: -flow.congestion.marked if flow.congestion else 0,
    )
    return {
        "packets": evidence,
        "packet_marks": marks[:_MARKED],
        "packet_marks_more": len(marks[_MARKED:]),
        "packet_unanswered": is_emulated and not any(flow.congestion.notified for flow in marks if flow.congestion),
        "packet_flows": flows,
        "packet_episodes": episodes[:_EPISODES],
        "packet_episodes_more": sum(sum(flow.causes.values()) for flow in flows) - len(episodes[:_EPISODES]),
    }


def _bar_limit_ms(run: RunEvidence) -> float | None:
    """Return where the iterations chart cuts its bars (ms), or None if it cuts none."""
    top_ms = goodput_plot.iteration_cut_ms(run.workload.series)
    cut = any(
        step.end_ns - step.start_ns > top_ms * 1e6 * 1.001 for rank in run.workload.series for step in rank.iterations
    )
    return top_ms if cut else None


def _faults(run: RunEvidence, verdict: VerdictFile, observed: Observed) -> list[_FaultView]:
    bounds = {fault.plan.id: recovery_check(verdict.checks, fault.plan.id) for fault in run.injected.faults}
    longest_ns = max((reach_ns(impact, bounds[key]) for key, impact in observed.impacts.items()), default=1)
    views = []
    for index, fault in enumerate(run.injected.faults):
        impact = observed.impacts.get(fault.plan.id)
        views.append(
            _FaultView(
                number=index + 1,
                colour=fault_bands.colour(fault, index),
                run=fault,
                receipt=fault.receipt,
                reasons=why_unproven_in(run, fault),
                impact=impact,
                band=fault_bands.band(run, fault, index),
                fidelity_means=_FIDELITY[fault.receipt.fidelity] if fault.receipt else "",
                bar=recovery_bar(impact, bounds[fault.plan.id], whole_ns=longest_ns),
                phases=()
                if impact is None
                else phase_bars(observed.phases.get(fault.plan.id, ()), impact, verdict.checks),
            )
        )
    return views


def _facts(run: RunEvidence, observed: Observed) -> list[tuple[str, str, str]]:
    """Return the tiles under the headline: (name, value, origin)."""
    units = {"wrong_elements": "count", "after_clear.total": "s", "jct_ratio": "ratio", "dip": "ratio"}
    names = {
        "wrong_elements": "wrong elements",
        "after_clear.total": "worst time to recover once cleared",
        "jct_ratio": "job time against its twin",
        "dip": "deepest dip",
    }
    tiles = [("iterations", str(observed.metrics["iterations"].value), observed.metrics["iterations"].detail)]
    if run.workload.serving is not None:
        names |= {"ttft.p99": "time to first token, P99", "tpot.p99": "time per output token, P99"}
        units = {"ttft.p99": "s", "tpot.p99": "s", **units}
    if run.fault_free is None:
        del units["jct_ratio"]
    for name, unit in units.items():
        observation = observed.metrics[name]
        text = summary.format_value(observation.value, unit)
        if name == "dip" and isinstance(observation.value, float):
            text = f"{100 * observation.value:.0f} %"
        if name == "jct_ratio" and isinstance(observation.value, float):
            text = f"{observation.value:.2f}\N{MULTIPLICATION SIGN}"
        tiles.append((names[name], ("≥ " if observation.censored else "") + text, observation.detail))
    tiles.append(
        ("QP errors / rebuilds", f"{run.workload.qp_errors} / {run.workload.rebuilds}", "as the traffic engine reports")
    )
    return tiles


def _metric_rows(observed: Observed) -> list[tuple[str, str, str]]:
    rows = []
    for name, observation in observed.metrics.items():
        metric = METRICS.get(name) or lookup(name, observed.impacts)
        unit = metric.unit if metric else "s"
        prefix = "≥ " if observation.censored else ""
        rows.append((name, prefix + summary.format_value(observation.value, unit), observation.detail))
    return rows


def _counter_rows(run: RunEvidence) -> list[tuple[str, str, int, int, int]]:
    """Return node, name, before, after and growth of each counter that changed."""
    return [
        (node, name, run.telemetry.counters_before[node][name], run.telemetry.counters_after[node][name], delta)
        for node, names in sorted(counter_deltas(run.telemetry).items())
        for name, delta in sorted(names.items())
        if delta
    ]


def _quiet_counters(run: RunEvidence) -> int:
    return sum(delta == 0 for names in counter_deltas(run.telemetry).values() for delta in names.values())
