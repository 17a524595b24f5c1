"""The page that compares two runs: differences, their direction and certainty. One offline file, all text escaped."""

from __future__ import annotations

import dataclasses
import json
import re

import msgspec
import pytest
from click.testing import CliRunner
from compared_runs import dead, otherwise, with_loads
from finished_run import EVIL, finished, parsed
from repeated_runs import without_faults
from synthetic_run import changed, synthetic_run

from faultbed.harness.analysis import noise
from faultbed.harness.cli.main import cli
from faultbed.harness.report.comparison import compare_page as compare_report
from faultbed.harness.report.comparison import compared_runs
from faultbed.harness.report.comparison.compare import compare
from faultbed.harness.verdict import Check
from faultbed.testbed.errors import UsageError


def page_of(a, b, floor=None):
    rows = compare(a.read_run(), b.read_run(), floor=floor)
    return compare_report.render_html(a, b, rows)


def text_of(html):
    return " ".join(" ".join(parsed(html).text).split())


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    a = finished(root, dead(with_loads(synthetic_run()), 100), name="a")
    b = finished(root, otherwise(), name="b")
    verdict = b.read_verdict()
    checks = tuple(
        msgspec.structs.replace(check, verdict="FAIL", detail="too long")
        if check.name == "after_clear.total"
        else check
        for check in verdict.checks
    )
    b.write_verdict(msgspec.structs.replace(verdict, checks=checks, verdict="FAIL"))
    b.write_plan(msgspec.structs.replace(b.read_plan(), workload={"size_bytes": 2, "collective": "all-reduce"}))
    b.write_environment(msgspec.structs.replace(b.read_environment(), guest_kernel="6.99"))
    return a, b


@pytest.fixture(scope="module")
def html(pair):
    return page_of(*pair)


def test_compare_page_is_valid_and_offline_without_scripts(html):
    page = parsed(html)
    ids = set(page.ids)
    assert len(page.ids) == len(ids)
    assert [value for name, value in page.attributes if name in {"src", "href"} and not value.startswith("#")] == []
    assert set(re.findall(r"url\(#([^)]+)\)", html)) | set(re.findall(r'href="#([^"]+)"', html)) <= ids
    assert not re.search(r"@import|<script|<link|javascript:|https?://(?!www\.w3\.org/)", html)
    assert all(value in ids for name, value in page.attributes if name == "aria-labelledby")


def test_compare_page_lists_differences_before_measurements(html):
    text = text_of(html)
    assert text.index("What differs before anything is measured") < text.index("Metrics, B over A")
    assert "workload: size_bytes 262144 2" in text
    assert "guest kernel — 6.99" in text
    assert "The plans differ" in text


def test_compare_page_lists_the_changed_check_first_with_its_reason(html):
    text = text_of(html)
    section = text[text.index("Checks Different in B: 1") :]
    assert section.index("after_clear.total") < section.index("fired.uplink")
    assert "B too long" in section
    assert "The verdict went from PASS to FAIL" in text


def test_compare_page_shows_both_bounds_of_one_metric():
    """The second bound of a metric used to hide the first one, even if that one failed."""

    def checks(least):
        common = {"name": "goodput_min_ratio", "observed": 0.4, "unit": "ratio"}
        return (
            Check(**common, verdict=least, bound=0.5, comparison="min"),
            Check(**common, verdict="PASS", bound=0.9, comparison="max"),
        )

    pairs = compared_runs.check_pairs(checks("PASS"), checks("FAIL"))
    assert [(pair.a.verdict, pair.b.verdict, pair.a.bound) for pair in pairs] == [
        ("PASS", "FAIL", 0.5),
        ("PASS", "PASS", 0.9),
    ]
    assert [(pair.a, pair.b is None) for pair in compared_runs.check_pairs(checks("PASS")[:1], ())] == [
        (checks("PASS")[0], True)
    ]


def test_compare_page_recoveries_and_phases_share_a_scale(pair):
    a, b = (compare_report._side(letter, one) for letter, one in zip("AB", pair, strict=True))
    uplink = next(one for one in compared_runs.recovery_pairs(a, b) if one.fault_id == "uplink")
    phases = {name: (left, right) for name, left, right in uplink.phases}
    left, right = phases["rebuild"]
    assert right.width == pytest.approx(4 * left.width)
    assert right.left == pytest.approx(left.left)
    took = [side.observed.impacts["uplink"].recovery_ns for side in (a, b)]
    assert uplink.b.bar.held * took[0] == pytest.approx(uplink.a.bar.held * took[1], rel=0.01)


def test_compare_page_shows_links_side_by_side(html):
    text = text_of(html)
    loads = text[text.index("Load of the links") :]
    assert "rtsw1:ctsw1 38.15 MiB 40 % 38.15 MiB 80 %" in loads
    assert "A rtsw → ctsw MMR 1.20" in loads
    assert "B rtsw → ctsw MMR 1.60" in loads


def test_compare_page_has_both_commands_and_the_common_axis(html, pair):
    text = text_of(html)
    for one in pair:
        assert f"run {one.path.name}/experiment.toml --seed 7" in text
    assert f"faultbed report --compare {pair[0].path.name} {pair[1].path.name}" in text
    assert "0 is the first firing of a fault in each run" in text


def test_compare_page_draws_the_noise_floor_around_the_runs_interval(tmp_path):
    run = synthetic_run()
    a, b = finished(tmp_path, run, name="a"), finished(tmp_path, run, name="b")
    conditions = noise.conditions_in(a, run)
    floor = noise.measure({f"aa-{factor}": (conditions, without_faults(run, factor)) for factor in (1, 1.1, 0.9, 1.05)})
    rows = compare(run, run, floor=floor)
    by_name = {row.metric: row for row in rows}
    for name in ("job time", "goodput.mean", "busbw.mean", "jct_ratio"):
        assert by_name[name].interval.low < by_name[name].own.low
        assert by_name[name].interval.high > by_name[name].own.high
    assert by_name["dip"].interval == by_name["dip"].own
    assert "widened by the lab's noise floor, which decides" in text_of(compare_report.render_html(a, b, rows))
    assert "no noise floor is kept" in text_of(page_of(a, b))


def test_compare_page_of_a_run_with_itself_shows_no_difference(tmp_path):
    a, b = (finished(tmp_path, with_loads(synthetic_run()), name=name) for name in "ab")
    text = text_of(page_of(a, b))
    assert "No difference shown between A and B" in text
    assert "The plans are the same" in text
    assert "Every check has the same verdict in both runs" in text
    assert "and could hide one of" in text


def test_compare_page_exists_for_a_run_without_faults_or_samples(tmp_path):
    run = synthetic_run()
    empty = changed(
        run,
        series=(),
        twin=None,
        connections=(),
        faults=(),
        counters_before={},
        counters_after={},
        end_ns=run.workload.t0_ns,
    )
    a, b = finished(tmp_path, empty, name="a"), finished(tmp_path, run, name="b")
    text = text_of(page_of(a, b))
    assert "No metric of these runs has an interval" in text
    assert "not in this run" in text
    quiet = finished(tmp_path, without_faults(run), name="c")
    assert "both begin at 0" in text_of(page_of(quiet, b))


def test_compare_page_has_every_metric_of_both_runs(tmp_path):
    """Metrics that fell to 0 in B are included: the ratio is 0 and has no logarithm."""
    run = synthetic_run()
    a, b = finished(tmp_path, changed(run, qp_errors=5), name="a"), finished(tmp_path, run, name="b")
    rows = compare(a.read_run(), b.read_run())
    html = compare_report.render_html(a, b, rows)
    assert [row.metric for row in rows if f"<code>{row.metric}</code>" not in html] == []
    assert next(row.ratio for row in rows if row.metric == "qp_errors") == 0


def test_compare_page_escapes_text_of_the_runs(tmp_path):
    run = synthetic_run()
    plan = dataclasses.replace(run.injected.faults[0].plan, target=EVIL, id=EVIL, params={EVIL: EVIL})
    fault = msgspec.structs.replace(run.injected.faults[0], plan=plan)
    evil = changed(run, lab=EVIL, accelerator=EVIL, faults=(fault, *run.injected.faults[1:]))
    a, b = finished(tmp_path, run, name="a"), finished(tmp_path, evil, name="b")
    b.write_plan(msgspec.structs.replace(b.read_plan(), experiment=EVIL, workload={EVIL: EVIL}))
    (b.path / "experiment.toml").write_text(EVIL)
    html = page_of(a, b)
    parsed(html)
    assert "<script" not in html
    assert "evil.example" not in html


def test_report_compare_command_writes_the_page_and_prints_its_path(pair, tmp_path):
    runs = [str(one.path) for one in pair]
    invoked = CliRunner().invoke(cli, ["report", "--compare", *runs], standalone_mode=False)
    assert invoked.exception is None
    default = compare_report.default_path(*pair)
    assert f"page {default}" in invoked.output
    first = default.read_text(encoding="utf-8")
    assert first == page_of(*pair)

    chosen = tmp_path / "ab.html"
    reported = CliRunner().invoke(
        cli, ["report", "--compare", *runs, "--html", str(chosen), "--json"], standalone_mode=False
    )
    output = json.loads(reported.output)
    assert output["html"] == str(chosen)
    assert chosen.read_text(encoding="utf-8") == first
    assert {difference["what"] for difference in output["differences"]} >= {"size_bytes"}

    assert CliRunner().invoke(cli, ["report", runs[0], "--html", str(chosen)]).exit_code == 2
    nowhere = tmp_path / "no" / "ab.html"
    with pytest.raises(UsageError, match="choose another place with --html"):
        compare_report.render(*pair, [], nowhere)


def test_report_compare_command_prints_numbers_if_no_page_can_be_written(pair):
    """A folder in the place of the page stands for a read-only archive."""
    default = compare_report.default_path(*pair)
    default.unlink(missing_ok=True)
    default.mkdir()
    try:
        invoked = CliRunner().invoke(
            cli, ["report", "--compare", *(str(one.path) for one in pair)], standalone_mode=False
        )
    finally:
        default.rmdir()
    assert invoked.exception is None
    assert "job time" in invoked.output
    assert "no page:" in invoked.output
