"""A run directory as the run loop writes it, with synthetic measurements, and a parser of its page."""

from __future__ import annotations

from datetime import UTC, datetime
from html.parser import HTMLParser

from house import DEMO
from synthetic_run import soft_topology

from faultbed.harness import judge
from faultbed.harness.experiment import run_plan as plan
from faultbed.harness.experiment.experiment_file import load
from faultbed.harness.record import rundir
from faultbed.harness.record.evidence import run_evidence
from faultbed.harness.run.judge_run import judge_run
from faultbed.harness.run.prepare.bind_to_lab import fit

VOID = {"meta", "br", "img", "hr", "link", "input"}


class Page(HTMLParser):
    """Checks nesting, and collects ids, attributes and text."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.attributes, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("style", "script"):
            self.text.append(data)


def write_run(directory, run):
    """Write the evidence of a run, as the run loop seals it."""
    for name, kind in run_evidence.OF_RUNS.items():
        for field in ("lab", "workload", "injected", "telemetry", "emulation", "routing"):
            if isinstance(evidence := getattr(run, field), kind):
                directory.write_evidence(name, "calibrate" if field == "emulation" else "measured", evidence)
    if run.twin is not None:
        directory.write_evidence("workload", "twin", run.twin)
    directory.write_samples(run.workload)


def finished(root, run, name="demo", *, planned=None, sealed=()):
    """Return a run directory as the run loop writes it, with synthetic measurements.

    `planned` is the plan of the run (default: that of the demo), `sealed` the evidence of its parts.
    """
    experiment = fit(load(DEMO), soft_topology(), "soft")
    planned = planned or plan.plan(experiment, inventory_digest="9f" * 32, version="0.1.0")
    directory = rundir.create(
        root,
        experiment=DEMO.read_bytes(),
        name=name,
        seed=7,
        lab="inventory/soft.yml",
        started=datetime(2026, 11, 21, tzinfo=UTC),
    )
    directory.write_plan(planned)
    write_run(directory, run)
    started_utc = "2026-11-21T00:00:00+00:00"
    directory.write_environment(rundir.describe_environment(accelerator="tcg", started_utc=started_utc))
    for evidence in sealed:
        names = {kind: part for part, kind in judge.KINDS.items()}
        directory.write_evidence(names[type(evidence)], "measured", evidence)
    judged = judge_run(directory)
    directory.write_ledger(judged.ledger)
    directory.write_verdict(judged.verdict)
    return directory


def parsed(html):
    page = Page()
    page.feed(html)
    page.close()
    assert page.open == []
    return page


EVIL = "<script>alert(1)</script>\"'&$x^2$"
