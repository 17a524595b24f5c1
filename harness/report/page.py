"""What every page of ours has in common: the templates, their filters, and the one way for charts to become markup.

A page is one file that works offline and runs nothing. All text is escaped by the templates; only drawings and charts,
which escape what they write, go in as markup.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from harness.quantities import format_bytes, format_duration, format_rate
from harness.report import summary
from harness.report.plots.charts import Chart

__all__ = ["MARKS", "environment", "markup"]

MARKS = {"PASS": "✓", "FAIL": "✕", "INCONCLUSIVE": "?", "ERROR": "!"}
"""A verdict's sign, for those who do not see its colour."""


def environment() -> jinja2.Environment:
    """The templates of `templates`, with our filters; a name that is not given is an error."""
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("harness.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update(
        duration=format_duration,
        size=format_bytes,
        rate=format_rate,
        value=summary.format_value,
        pretty=_pretty,
        capitalize_first=lambda text: text[:1].upper() + text[1:],
        verdict_mark=lambda name: MARKS[str(name)],
    )
    return found


def markup(chart: Chart | None) -> Mapping[str, Markup] | None:
    """A chart in both of its widths, for a template."""
    if chart is None:
        return None
    # Charts carry text only as matplotlib wrote it, which escapes XML.
    return {"wide": Markup(chart.wide), "narrow": Markup(chart.narrow)}  # noqa: S704


def _pretty(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value, order="sorted"), indent=2).decode()
