"""Common parts of all pages: the templates, their filters, and the conversion of charts to markup.

A page is one file that works offline. The page of a run has one script, which zooms its charts over time; the page's
security policy names its digest, so that a browser runs no other. The templates escape all text. Only drawings and
charts, which escape their own text, are inserted as markup.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from faultbed.harness.bounds import rule_words
from faultbed.harness.quantities import format_bytes, format_duration, format_rate
from faultbed.harness.report import summary
from faultbed.harness.report.plots.charts import Chart

__all__ = ["CONTENTS_HERE", "MARKS", "Script", "environment", "markup", "moment", "script", "with_contents"]

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
        rule_words=rule_words,
        sign=summary.format_comparison,
        value=summary.format_value,
        pretty=_pretty,
        capitalize_first=lambda text: text[:1].upper() + text[1:],
        verdict_mark=lambda name: MARKS[str(name)],
    )
    return templates


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script inside a page: its text, and its digest for the page's security policy (CSP 3, `hash-source`)."""

    text: Markup
    digest: str


@functools.cache
def script(name: str) -> Script:
    """Return a script of `templates`."""
    loader = environment().loader
    if loader is None:
        raise LookupError(name)
    text = loader.get_source(environment(), name)[0]
    if "</script" in text:
        raise ValueError(f"{name}: a script inside a page must not contain </script")
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return Script(text=Markup(text), digest=f"sha256-{digest}")  # noqa: S704 - our own file


def markup(chart: Chart | None) -> Mapping[str, Markup] | None:
    """Return a chart in both of its widths, for a template."""
    if chart is None:
        return None
    # The text in charts was written by matplotlib, which escapes XML.
    return {"wide": Markup(chart.wide), "narrow": Markup(chart.narrow)}  # noqa: S704


def _pretty(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value, order="sorted"), indent=2).decode()


CONTENTS_HERE = Markup("<!-- contents -->")
"""Where `with_contents` puts the list of a page's sections."""
_HEADING = re.compile(r'<h2 id="(?P<id>[^"]+)"[^>]*>(?P<text>.*?)</h2>', re.DOTALL)


def moment(at: datetime) -> str:
    """Return a time in UTC and in this machine's zone: `2026-11-27 20:41:37 UTC (21:41:37 +0100 here)`."""
    local = at.astimezone()
    same = local.utcoffset() == timedelta(0)
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" + ("" if same else f" ({local:%H:%M:%S %z} here)")


def with_contents(html: str) -> str:
    """Return a page with links to its sections at `CONTENTS_HERE`."""
    headings = [(heading["id"], re.sub(r"<[^>]*>", "", heading["text"]).strip()) for heading in _HEADING.finditer(html)]
    links = " ".join(f'<a href="#{name}">{text}</a>' for name, text in headings)
    return html.replace(CONTENTS_HERE, links, 1)
