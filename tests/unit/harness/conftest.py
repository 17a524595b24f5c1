"""Fixtures of the harness's unit tests."""

from __future__ import annotations

import hashlib
import os
import pickle
import sys

import pytest
from samples import ALL

# Excluded: a page has several of these, each with its own ids.
SEVERAL = ("faultbed.harness.report.plots.gantt_plot", "gantt_chart")
ONE_A_PAGE = (
    "faultbed.harness.report.plots.goodput_plot",
    "faultbed.harness.report.plots.counter_plot",
    "faultbed.harness.report.plots.probe_plot",
    "faultbed.harness.report.comparison.compare_plots",
    "faultbed.harness.report.sweeps.sweep_chart",
)
DRAWN = {}


@pytest.fixture(scope="session")
def drawn_folder(tmp_path_factory):
    """Return the folder of charts that pytest-xdist's workers share; None without other workers."""
    return tmp_path_factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else None


@pytest.fixture
def drawn_anew():
    """Draw every chart of this test, without the shared ones."""


@pytest.fixture(autouse=True)
def charts_drawn_once(request, monkeypatch, drawn_folder):
    """Draw a chart of each kind once: a page takes a second of matplotlib, and most tests check other parts of it.

    Each page still decides whether it has the chart. `make nightly` draws the charts of all pages.
    """
    if "drawn_anew" in request.fixturenames:
        return
    module, name = SEVERAL
    if module in sys.modules:
        monkeypatch.setattr(
            sys.modules[module], name, _once_for_equal_data(getattr(sys.modules[module], name), drawn_folder)
        )
    for module in ONE_A_PAGE:
        if module in sys.modules and not ALL:
            monkeypatch.setattr(
                sys.modules[module], "both_widths", _once_of_a_kind(sys.modules[module].both_widths, drawn_folder)
            )


def _once_for_equal_data(chart, folder):
    def drawn(*args):
        key = chart.__qualname__, hashlib.sha256(pickle.dumps(args)).hexdigest()
        return _drawn(key, folder, lambda: chart(*args))

    return drawn


def _once_of_a_kind(both_widths, folder):
    return lambda draw: _drawn((draw.__module__, draw.__qualname__), folder, lambda: both_widths(draw))


def _drawn(key, folder, draw):
    """Return the chart with this key, which this worker, or another one, may have drawn."""
    if key not in DRAWN:
        path = folder and folder / f"chart-{hashlib.sha256(repr(key).encode()).hexdigest()}"
        if path and path.exists():
            DRAWN[key] = pickle.loads(path.read_bytes())
        else:
            DRAWN[key] = draw()
            if path:
                partial = path.with_name(f"{path.name}.{os.getpid()}")
                partial.write_bytes(pickle.dumps(DRAWN[key]))
                partial.rename(path)
    return DRAWN[key]
