"""Fixtures of the harness's unit tests."""

from __future__ import annotations

import hashlib
import pickle
import sys

import pytest

CHARTS = {"goodput_plot": ("goodput_chart", "iterations_chart"), "gantt_plot": ("gantt_chart",)}
DRAWN = {}


@pytest.fixture
def drawn_anew():
    """Draw every chart of this test."""


@pytest.fixture(autouse=True)
def charts_drawn_once(request, monkeypatch):
    """Draw a chart of the same data once: a page takes a second, and most pages differ in other parts."""
    if "harness.report.run_page" not in sys.modules or "drawn_anew" in request.fixturenames:
        return
    for module, names in CHARTS.items():
        for name in names:
            plot = sys.modules[f"harness.report.plots.{module}"]
            monkeypatch.setattr(plot, name, _once(getattr(plot, name)))


def _once(draw):
    def drawn(*args):
        key = draw.__qualname__, hashlib.sha256(pickle.dumps(args)).digest()
        if key not in DRAWN:
            DRAWN[key] = draw(*args)
        return DRAWN[key]

    return drawn
