"""The page `docs/metrics.md`: tables of what `[[expect]]` and `[[stop]]` can bound.

`python -m faultbed.harness.experiment.declare.metric_tables > docs/metrics.md` writes the page again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

from faultbed.harness.experiment import stop
from faultbed.harness.experiment.metrics import LINK_PREFIXES, METRICS, PER_FAULT_PREFIXES, Metric, lookup

__all__ = ["page"]

_HEAD = """# Metrics, one by one

This page is generated from `harness/experiment/metrics.py` and `harness/experiment/stop.py`.
[Experiments: reference](experiment-reference.md#metrics) explains how bounds on them are decided.

## `[[expect]]`

The column "decided by" says what a bound is about:

* *fact*: the value of this run decides.
* *event*: the time of an event in this run, with the range in which it lies.
* *contrast*: a fault against the same run without it, before and after the fault.
* *setting*: what runs of the experiment do in general. One run decides only far from the bound.
* "or": `of = "run"` or `of = "setting"` in `[[expect]]` chooses, and the first is the default.

A bound on a metric with a mark under "faults" is INCONCLUSIVE unless the faults provably happened.

| metric | unit | decided by | faults | meaning |
|---|---|---|---|---|"""

_STOPS = """
## `[[stop]]`

| metric | unit | bound | meaning |
|---|---|---|---|"""


def page() -> str:
    """Return the text of the page."""
    return "\n".join([_HEAD, *map(_row, _metrics()), _STOPS, *map(_stop_row, stop.METRICS.values()), ""])


def _metrics() -> list[Metric]:
    """Return every metric in order of its name, with a word in angle brackets for the part that a lab decides."""
    of_a_fault = "<fault id>"
    per_fault = [lookup(prefix + of_a_fault, [of_a_fault]) for prefix in PER_FAULT_PREFIXES]
    of_a_link = [replace(metric, name=f"{name}<link or switch>") for name, metric in LINK_PREFIXES.items()]
    return sorted([*METRICS.values(), *filter(None, per_fault), *of_a_link], key=lambda metric: metric.name)


def _row(metric: Metric) -> str:
    meaning = metric.meaning + ("; needs a fault-free twin" if metric.needs_twin else "")
    decided = " or ".join(_estimands(metric))
    return f"| `{metric.name}` | {metric.unit} | {decided} | {'x' if metric.about_faults else ''} | {meaning} |"


def _estimands(metric: Metric) -> Iterator[str]:
    yield metric.estimand
    if metric.either:
        yield "fact" if metric.estimand == "setting" else "setting"


def _stop_row(metric: stop.Metric) -> str:
    return f"| `{metric.name}` | {metric.unit} | {metric.bound} | {metric.meaning} |"


if __name__ == "__main__":
    sys.stdout.write(page())
