"""Fixtures of the harness's unit tests."""

from __future__ import annotations

import hashlib
import pickle
import sys

import pytest
from samples import ALL

# A page has several of these, each with ids of its own.
SEVERAL = ("harness.report.plots.gantt_plot", "gantt_chart")
ONE_A_PAGE = (
    "harness.report.plots.goodput_plot",
    "harness.report.plots.counter_plot",
    "harness.report.plots.probe_plot",
    "harness.report.comparison.compare_plots",
    "harness.report.sweeps.sweep_chart",
)
DRAWN = {}


@pytest.fixture
def drawn_anew():
    """Draw every chart of this test."""


@pytest.fixture(autouse=True)
def charts_drawn_once(request, monkeypatch):
    """Draw a chart of each kind once: a page takes a second of matplotlib, and most tests look at another part of it.

    Whether a page has the chart is decided each time. `make nightly` draws the charts of all pages.
    """
    if "drawn_anew" in request.fixturenames:
        return
    module, name = SEVERAL
    if module in sys.modules:
        monkeypatch.setattr(sys.modules[module], name, _once_for_equal_data(getattr(sys.modules[module], name)))
    for module in ONE_A_PAGE:
        if module in sys.modules and not ALL:
            monkeypatch.setattr(sys.modules[module], "twice", _once_of_a_kind(sys.modules[module].twice))


def _once_for_equal_data(chart):
    def drawn(*args):
        key = chart.__qualname__, hashlib.sha256(pickle.dumps(args)).digest()
        if key not in DRAWN:
            DRAWN[key] = chart(*args)
        return DRAWN[key]

    return drawn


def _once_of_a_kind(twice):
    def drawn(draw):
        key = draw.__module__, draw.__qualname__
        if key not in DRAWN:
            DRAWN[key] = twice(draw)
        return DRAWN[key]

    return drawn
