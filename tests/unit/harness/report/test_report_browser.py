"""The report in a real browser: it fits phones and screens, fetches nothing, and its moments can be selected."""

from __future__ import annotations

import re

import pytest
from compared_runs import otherwise, with_loads
from finished_run import finished
from recorded import RECORDED
from synthetic_run import T0, synthetic_run

from bench.results import chromium
from faultbed.harness.report import run_page as report
from faultbed.harness.report.comparison import compare_page as compare_report
from faultbed.harness.report.comparison.compare import compare

PROGRAM = chromium.installed()
MOST_BYTES = 3 << 20

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed (apt-get install chromium)"),
]

TOO_WIDE = """
[...document.querySelectorAll("main *")]
  .filter(one => one.getBoundingClientRect().right > document.documentElement.clientWidth + 1
                 && getComputedStyle(one).position !== "absolute" && !one.closest("svg") )
  .map(one => one.tagName + "." + one.className).slice(0, 5)
"""
SHOWN = """[...document.querySelectorAll(".frames > figure")].map(one => getComputedStyle(one).display !== "none")"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    directory = finished(tmp_path_factory.mktemp("runs"), synthetic_run())
    directory.write_telemetry(RECORDED, t0_ns=T0)
    return report.render(directory.path)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    a, b = finished(root, with_loads(synthetic_run()), name="a"), finished(root, otherwise(), name="b")
    rows = compare(a.read_run(), b.read_run())
    return compare_report.render(a, b, rows, compare_report.default_path(a, b))


@pytest.fixture(params=["page", "comparison"])
def either(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium.browser(PROGRAM, tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.mark.parametrize("width", [500, 1200])
def test_report_page_fits_every_window_width(browser, either, width):
    browser.open(either, width=width)

    inside = browser.value("document.documentElement.clientWidth")
    assert inside <= width
    assert browser.value("document.documentElement.scrollWidth") <= inside
    assert browser.value(TOO_WIDE) == []


@pytest.fixture(scope="module")
def loaded_page(tmp_path_factory):
    return report.render(finished(tmp_path_factory.mktemp("runs"), with_loads(synthetic_run())).path)


@pytest.mark.parametrize("width", [500, 1200])
def test_loads_of_links_with_long_sizes_fit_their_column(browser, loaded_page, width):
    """Measured and expected bytes side by side were wider than the card: the page could be scrolled to the right."""
    browser.open(loaded_page, width=width)
    long = '100.02 MiB <small>100 %</small> <small class="expected">100.02 MiB expected</small>'
    cells = "[...document.querySelectorAll('.loads > table td')]"
    assert browser.value(f"{cells}.map(cell => {{ cell.innerHTML = '{long}' }}).length")

    assert browser.value("document.documentElement.scrollWidth") <= width
    right = "document.querySelector('.loads').getBoundingClientRect().right"
    assert browser.value(f"{cells}.every(cell => cell.getBoundingClientRect().right <= {right} + 1)")


@pytest.mark.parametrize(("width", "visible", "hidden"), [(500, "narrow", "wide"), (1200, "wide", "narrow")])
def test_report_page_has_charts_for_each_width(browser, either, width, visible, hidden):
    browser.open(either, width=width)

    shown = (
        f'[...document.querySelectorAll(".only-{visible} svg")].every(one => one.getBoundingClientRect().height > 50)'
    )
    assert browser.value(shown)
    assert browser.value(
        f'[...document.querySelectorAll(".only-{hidden} svg")].every(one => !one.getClientRects().length)'
    )


def test_report_page_requests_nothing_but_its_file(browser, either):
    before = len(browser.requested)
    browser.open(either, width=1200)

    assert browser.requested[before:] == [either.as_uri()]
    assert not re.search(r"https?://(?!www\.w3\.org/)", either.read_text(encoding="utf-8"))
    assert either.stat().st_size <= MOST_BYTES


def test_report_page_switches_moments_without_a_script(browser, page):
    """One drawing is visible at a time, the chosen one; and the plain fabric below it is really drawn."""
    browser.open(page, width=1200)
    count = browser.value('document.querySelectorAll("input[name=moment]").length')

    for chosen in range(count):
        browser.value(f'document.getElementById("moment-{chosen}").click()')
        assert browser.value(SHOWN) == [number == chosen for number in range(count)]
    drawn = 'getComputedStyle(document.querySelector("#fabric-plain .switch rect")).strokeWidth'
    assert browser.value(drawn) == "1.3px"
    assert browser.value('document.querySelectorAll(".frames > figure:last-of-type use")[0].getBBox().width > 100')


CHART = """(figure => {
  const box = [...figure.querySelectorAll(":scope > div")].find(one => one.clientWidth), svg = box.querySelector("svg");
  const text = svg.querySelector("text").getBoundingClientRect();
  return [box.clientWidth, svg.getBoundingClientRect().width, svg.getBoundingClientRect().height, box.scrollLeft,
    text.width, document.documentElement.scrollWidth <= document.documentElement.clientWidth];
})(document.querySelector("#h-goodput ~ figure"))"""
PRESS = 'document.querySelector("#h-goodput ~ figure .zoom button:nth-of-type({})").click()'


@pytest.mark.parametrize("width", [500, 1280])
def test_chart_over_time_zooms_its_time_axis_and_nothing_else(browser, page, width):
    browser.open(page, width=width)
    inside, whole, height, _, text, _ = browser.value(CHART)
    assert whole == inside

    browser.value(PRESS.format(1))
    browser.value(PRESS.format(1))
    _, zoomed, zoomed_height, left, zoomed_text, fits = browser.value(CHART)
    assert zoomed == pytest.approx(4 * inside, rel=0.01)
    assert zoomed_height == pytest.approx(height, rel=0.01)
    assert zoomed_text == pytest.approx(text, rel=0.05)
    assert left == pytest.approx(1.5 * inside, rel=0.02)  # the middle of the run stays in the middle
    assert fits

    browser.value(PRESS.format(3))
    assert browser.value(CHART)[:3] == [inside, whole, height]
    assert browser.value('document.querySelectorAll(".zoom button:disabled").length > 0')


PLACES = """[...document.querySelectorAll(".zoomable svg text")].map(one => {
  const {left, top, width, height} = one.getBoundingClientRect();
  return [left, top, width, height].map(Math.round).join();
})"""


def test_page_without_its_script_shows_whole_charts_and_no_buttons(browser, page, tmp_path):
    html, found = re.subn(r"<script>.*?</script>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert found == 1
    (tmp_path / "report.html").write_text(html, encoding="utf-8")
    browser.open(page, width=1200)
    browser.value('document.querySelectorAll(".zoom").forEach(one => one.remove())')
    with_script = browser.value(PLACES)
    assert len(with_script) > 10
    browser.open(tmp_path / "report.html", width=1200)
    assert browser.value(PLACES) == with_script  # also the label that is rotated
    assert browser.value('document.querySelectorAll(".zoom").length') == 0
    inside, whole, *_ = browser.value(CHART)
    assert whole == inside


def test_print_shows_every_moment(browser, page):
    browser.open(page, width=1200)
    browser.send("Emulation.setEmulatedMedia", media="print")

    assert all(browser.value(SHOWN))
    assert browser.value("document.documentElement.scrollWidth") <= 1200


def test_print_of_a_comparison_fits_the_paper(browser, comparison):
    browser.open(comparison, width=794)
    browser.send("Emulation.setEmulatedMedia", media="print")

    assert browser.value("document.documentElement.scrollWidth") <= 794
    assert browser.value(TOO_WIDE) == []


@pytest.mark.parametrize("width", [500, 1200])
def test_compare_page_forest_marks_lie_on_their_axis(browser, comparison, width):
    """Each dot lies within its interval, and 1 is where the axis shows it."""
    browser.open(comparison, width=width)

    middles = browser.value(
        """[...document.querySelectorAll(".forest")].map(table => {
          const one = [...table.querySelectorAll(".scale i")].find(tick => tick.textContent === "1");
          const box = one.getBoundingClientRect();
          return [...table.querySelectorAll(".one")].map(
            line => Math.abs((box.left + box.right) / 2 - line.getBoundingClientRect().left));
        })"""
    )
    assert len(middles) == 2
    assert all(table for table in middles)
    assert max(apart for table in middles for apart in table) < 2
    assert browser.value(
        """[...document.querySelectorAll(".ratio")].filter(one => one.querySelector(".wide-ci")).every(one => {
          const dot = one.querySelector(".dot").getBoundingClientRect(), x = (dot.left + dot.right) / 2;
          const ci = one.querySelector(".wide-ci").getBoundingClientRect();
          return ci.left - 1 <= x && x <= ci.right + 1;
        })"""
    )
