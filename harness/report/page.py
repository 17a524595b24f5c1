"""Common parts of all pages: the templates, their filters, and the conversion of charts to markup.

A page is one file that works offline and runs no scripts. The templates escape all text. Only drawings and charts,
which escape their own text, are inserted as markup.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from faultbed.harness.quantities import format_bytes, format_duration, format_rate
from faultbed.harness.report import summary
from faultbed.harness.report.plots.charts import Chart

__all__ = ["MARKS", "environment", "markup"]

MARKS = {"PASS": "✓", "FAIL": "✕", "INCONCLUSIVE": "?", "ERROR": "!"}
"""A sign for each verdict, for readers who cannot see its colour."""


@functools.cache
def environment() -> jinja2.Environment:
    """Return the environment of `templates` with faultbed's filters. An undefined name is an error."""
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("faultbed.harness.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters.update(
        duration=format_duration,
        size=format_bytes,
        rate=format_rate,
        observed=summary.format_observed,
        value=summary.format_value,
        pretty=_pretty,
        capitalize_first=lambda text: text[:1].upper() + text[1:],
        verdict_mark=lambda name: MARKS[str(name)],
    )
    return templates


def markup(chart: Chart | None) -> Mapping[str, Markup] | None:
    """Return a chart in both of its widths, for a template."""
    if chart is None:
        return None
    # The text in charts was written by matplotlib, which escapes XML.
    return {"wide": Markup(chart.wide), "narrow": Markup(chart.narrow)}  # noqa: S704


def _pretty(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value, order="sorted"), indent=2).decode()
