"""The report is one offline page, made only from the run directory, with all text escaped."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re
import time
from dataclasses import replace
from datetime import UTC, datetime

import msgspec
import pytest
from click.testing import CliRunner
from finished_run import EVIL, finished, parsed
from gbn_model import LQPN, A, B, Wire, frame, go_back_n
from synthetic_run import changed, lost_at, soft_topology, synthetic_run, with_doubts

from faultbed.harness.analysis.observe import observe
from faultbed.harness.analysis.timeline import SlowDown
from faultbed.harness.cli.main import cli
from faultbed.harness.packets import evidence
from faultbed.harness.report import page as page_parts
from faultbed.harness.report import run_page as report
from faultbed.harness.report import summary
from faultbed.harness.report.fabric.drawing import Mark, fabric_svg
from faultbed.harness.report.fabric.drawing_layout import lay_out
from faultbed.harness.report.plots import fault_bands
from faultbed.harness.report.plots.goodput_plot import goodput_chart, iterations_chart
from faultbed.harness.report.summary import format_observed
from faultbed.harness.verdict import Check, Verdict, VerdictFile
from faultbed.inject.evidence.receipt import Armed, Cleared
from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory.lab_inventory import load
from faultbed.testbed.observe.packet_capture import Captured, PortProof
from faultbed.testbed.shipped import inventories

ROLES = ("rtsw", "ctsw", "atsw")


@pytest.fixture(scope="module")
def passed(tmp_path_factory):
    directory = finished(tmp_path_factory.mktemp("runs"), synthetic_run())
    return report.render(directory.path).read_text(encoding="utf-8")


def test_report_page_is_well_formed_with_unique_ids(passed):
    page = parsed(passed)

    assert len(page.ids) == len(set(page.ids))


def test_report_contents_lead_to_every_section(passed):
    page = parsed(passed)
    links = [value[1:] for name, value in page.attributes if name == "href" and (value or "").startswith("#h-")]
    assert links == [name for name in page.ids if name.startswith("h-")]
    assert len(links) > 5


def test_report_says_when_the_run_began_in_utc(passed):
    assert re.search(r"Started \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", passed)


def test_moment_names_the_local_time_if_it_differs(monkeypatch):
    at = datetime(2026, 11, 27, 23, 30, tzinfo=UTC)
    for zone, text in (("UTC", "2026-11-27 23:30:00 UTC"), ("Asia/Tokyo", "23:30:00 UTC (08:30:00 +0900 here)")):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        assert page_parts.moment(at).endswith(text)
    monkeypatch.undo()
    time.tzset()


def test_report_page_fetches_nothing_and_runs_only_its_own_script(passed):
    page = parsed(passed)
    outside = [
        (name, value)
        for name, value in page.attributes
        if name in {"src", "href", "xlink:href", "action", "data"} and not (value or "").startswith("#")
    ]

    assert {name for name, _ in outside} == {"href"}
    assert {value for _, value in outside} <= set(report._RAW_FILES)  # files beside it, which a reader opens
    assert not re.search(r"url\((?!#)", passed)
    assert not re.search(r"@import|<link|javascript:", passed)
    assert not re.search(r"https?://(?!www\.w3\.org/)", passed)
    (script,) = re.findall(r"<script[^>]*>(.*?)</script>", passed, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'\"" in passed
    assert not re.search(r"fetch|XMLHttp|import|eval|innerHTML|storage", script)


def test_report_page_references_have_their_targets(passed):
    ids = set(parsed(passed).ids)
    wanted = set(re.findall(r"url\(#([^)]+)\)", passed)) | set(re.findall(r'href="#([^"]+)"', passed))

    assert wanted <= ids
    assert all(value in ids for name, value in parsed(passed).attributes if name == "aria-labelledby")


def test_report_states_the_verdict_and_each_fault_in_words(passed):
    text = " ".join(" ".join(parsed(passed).text).split())

    assert "PASS" in text
    assert "The job survived" in text
    assert "link.flap on rtsw1:ctsw1 recovered in 888 ms (bound 8 s)." in text
    assert "every element right" in text
    assert "Straggler: host2" in text
    assert "faultbed run experiment.toml --seed 7" in text


def test_report_has_every_check_and_moved_counter(passed):
    text = " ".join(parsed(passed).text)

    for name in ("recovery.uplink", "after_clear.total", "nak_episodes", "fired.loss", "lab_restored"):
        assert name in text
    assert "host3 rxe0.out_of_seq_request" in text
    assert "+61" in text


def test_report_pictures_have_text_alternatives(passed):
    attributes = parsed(passed).attributes

    labels = [value for name, value in attributes if name == "aria-label"]
    assert sum(value == "img" for name, value in attributes if name == "role") <= len(labels)
    assert any("Fabric drawing: 2 racks, 4 hosts" in label for label in labels)


@pytest.mark.usefixtures("drawn_anew")
def test_report_of_the_same_run_has_the_same_bytes(tmp_path):
    directory = finished(tmp_path, synthetic_run())

    assert report.render_html(directory) == report.render_html(directory)


def test_report_of_a_run_without_firing_shows_that_it_proves_nothing(tmp_path):
    html = report.render(finished(tmp_path, synthetic_run(fired=False)).path).read_text(encoding="utf-8")

    assert "This run proves nothing" in html
    assert "it never fired" in html


def test_report_shades_a_fault_that_was_not_cleared_until_the_end_of_the_run():
    """The shade ended when the fault was due to end, although it was still in place and the lab DIRTY."""
    run = synthetic_run()
    first = run.injected.faults[0]
    stuck = msgspec.structs.replace(first.receipt, cleared=Cleared(ok=False, error="host1 does not answer"))
    until_s = [
        fault_bands.band(run, msgspec.structs.replace(first, receipt=receipt), 0).end_s
        for receipt in (first.receipt, stuck)
    ]
    assert until_s == [
        pytest.approx((first.receipt.cleared.at_ns - run.workload.t0_ns) / 1e9),
        pytest.approx((run.workload.end_ns - run.workload.t0_ns) / 1e9),
    ]


def test_report_says_why_a_workload_failed(tmp_path):
    """A check without a number read "workload was —, must be — allowed."."""
    failed = changed(synthetic_run(), failure="host3 was lost after 12 iterations")
    html = report.render(finished(tmp_path, failed).path).read_text(encoding="utf-8")

    assert "workload: it failed: host3 was lost after 12 iterations." in html
    assert "must be — allowed" not in html


@pytest.mark.parametrize(
    ("comparison", "observed", "bound", "words"),
    [
        ("equals", "host3", "host2", "straggler was host3, must be host2."),
        ("max", 0.5, 0.2, "straggler was 0.5, at most 0.2 allowed."),
        ("min", 0.5, 0.7, "straggler was 0.5, at least 0.7 allowed."),
    ],
)
def test_summary_states_the_bound_that_a_failed_check_broke(comparison, observed, bound, words):
    check = Check(
        name="straggler", verdict=Verdict.FAIL, observed=observed, bound=bound, unit="", comparison=comparison
    )
    verdict = VerdictFile(
        experiment="x", seed=1, lab="soft", verdict=Verdict.FAIL, checks=(check,), faults=(), lab_state="CLEAN"
    )
    run = synthetic_run()
    assert summary.sentence(verdict, run, observe(run)).startswith(words)


def test_summary_states_no_cost_of_a_fault_with_which_all_ranks_became_slower():
    """Its check said that recovery took 0 to 3 s. The report's first sentence said that it cost no goodput."""
    run = synthetic_run()
    receipt = run.injected.faults[0].receipt
    fired = Check(name="fired.uplink", verdict=Verdict.PASS, observed=1, bound=1, unit="count")
    verdict = VerdictFile(
        experiment="x", seed=1, lab="soft", verdict=Verdict.PASS, checks=(fired,), faults=(receipt,), lab_state="CLEAN"
    )
    observed = observe(run)
    slow_down = SlowDown(reason="all ranks compute 1.9 times as long since the fault", recovery_ns=3_000_000_000)
    impact = replace(observed.impacts["uplink"], recovery_ns=0, after_clear_ns=0, slow_down=slow_down)
    sentence = summary.sentence(verdict, run, replace(observed, impacts={"uplink": impact}))
    assert "cost no goodput" not in sentence
    assert "is unknown: all ranks compute 1.9 times as long" in sentence


def test_report_states_no_recovery_of_a_fault_in_doubt(tmp_path):
    run = synthetic_run()
    doubted = with_doubts(run.injected.faults[0], "no independent witness")
    run = changed(run, faults=(doubted, *run.injected.faults[1:]))

    html = report.render(finished(tmp_path, run).path).read_text(encoding="utf-8")

    assert "link.flap on rtsw1:ctsw1 recovered" not in html
    assert "packet.drop on host3:rxe0 recovered" in html
    assert "not proven to have fired" in html


def test_report_of_an_empty_run_exists(tmp_path):
    """The run broke at once: no samples, no iterations, faults never tried, no counters."""
    run = synthetic_run()
    run = changed(
        run,
        series=(),
        twin=None,
        connections=(),
        counters_before={},
        counters_after={},
        faults=tuple(msgspec.structs.replace(fault, receipt=None) for fault in run.injected.faults),
        errors=("host3 did not answer",),
        end_ns=run.workload.t0_ns,
    )

    html = report.render(finished(tmp_path, run).path).read_text(encoding="utf-8")

    parsed(html)
    assert "The harness failed" in html
    assert "host3 did not answer" in html


def test_report_names_lost_queue_pairs(tmp_path):
    run = synthetic_run()
    lost = tuple(lost_at(run.workload.t0_ns + number * 10**6) for number in range(50))
    page = report.render(finished(tmp_path, changed(run, qps_lost=lost)).path).read_text(encoding="utf-8")
    assert "50 queue pairs lost" in page
    assert page.count("RETRY_EXC_ERR") == 40
    assert "all are in evidence/measured/workload.json" in page


def test_report_describes_captured_packets_by_flow(tmp_path):
    """The proof, the flow that lost packets, its episode with its phases, and links to existing files."""
    directory = finished(tmp_path, synthetic_run())
    frames = go_back_n(count=400, losses={60}).wire.frames()
    proof = PortProof(name=frames.interfaces[0], captured=len(frames), counted=len(frames), drops=0)
    captured = Captured(frames=frames, proofs=(proof,), epoch_offset_ns=0, clock_error_ns=1000)
    directory.write_packets(evidence.keep(captured, directory.path, {"loss": (1_100_000, 1_200_000)}))
    page = parsed(report.render(directory.path).read_text())
    text = " ".join("".join(page.text).split())
    assert "none breaks a rule" in text
    assert f"{len(frames):,} captured of {len(frames):,} that the port counted, 0 dropped" in text
    assert "from the gap to the NAK" in text
    linked = [value for name, value in page.attributes if name == "href" and value.endswith(".pcapng")]
    assert linked == ["capture.pcapng", "capture-loss.pcapng"]
    assert all((directory.path / name).exists() for name in linked)


def packets_of(tmp_path, frames):
    """Return the section about packets of a run with this capture."""
    directory = finished(tmp_path, synthetic_run())
    proof = PortProof(name=frames.interfaces[0], captured=len(frames), counted=len(frames), drops=0)
    captured = Captured(frames=frames, proofs=(proof,), epoch_offset_ns=0, clock_error_ns=1000)
    directory.write_packets(evidence.keep(captured, directory.path, {}))
    page = report.render(directory.path).read_text(encoding="utf-8")
    section = page[page.index('id="h-packets"') :]
    return " ".join(section[: section.index("</section>")].split())


def test_report_describes_ecn_marks_and_cnps_by_flow(tmp_path):
    """Two CEs; a CNP 4 us after the first of them, and one without a mark 85 us later."""
    wire = Wire()
    wire.request(0, 1)
    wire.response(50, 1)
    wire.request(1000, 2, ecn=3)
    wire.request(2000, 3, ecn=3)
    for at_ns in (5000, 90_000):
        wire.put(at_ns, frame(B, A, opcode=0x81, dqpn=LQPN, psn=0, payload=16, becn=1), outbound=False)

    text = packets_of(tmp_path, wire.frames())

    for label, value in (
        ("Marked CE", "2"),
        ("CNPs back", "2"),
        ("Without a mark", "1"),
        ("Median delay", "4 µs"),
        ("Shortest interval", "85 µs"),
    ):
        assert f'data-label="{label}">{value}</td>' in text
    assert "No RNIC here answers a mark" not in text


def test_report_shows_ecn_marks_without_a_cnp(tmp_path):
    wire = Wire()
    wire.request(0, 1)
    wire.request(1000, 2, ecn=3)

    assert "No RNIC here answers a mark" in packets_of(tmp_path, wire.frames())


def test_report_counts_reordered_packets(tmp_path):
    wire = Wire()
    for at_ns, psn in ((0, 1), (1000, 3), (2000, 2), (3000, 4)):
        wire.request(at_ns, psn)

    text = packets_of(tmp_path, wire.frames())

    assert 'data-label="Reordered">1</td>' in text
    assert "No packet was marked CE, and no CNP was sent." in text


def test_report_escapes_text_of_the_lab(tmp_path):
    run = synthetic_run()
    receipt = run.injected.faults[0].receipt
    fired = msgspec.structs.replace(receipt.fired, witness=EVIL, must_move={EVIL: 1})
    receipt = msgspec.structs.replace(receipt, id=EVIL, target=EVIL, fired=fired, armed=Armed(ok=True, readback=EVIL))
    fault = msgspec.structs.replace(
        run.injected.faults[0],
        receipt=msgspec.structs.replace(receipt, doubts=(EVIL,)),
        plan=dataclasses.replace(run.injected.faults[0].plan, target=EVIL, id=EVIL, params={EVIL: EVIL}),
    )
    ranks = (msgspec.structs.replace(run.workload.ranks[0], host=EVIL), *run.workload.ranks[1:])
    run = changed(
        run,
        lab=EVIL,
        accelerator=EVIL,
        ranks=ranks,
        faults=(fault, *run.injected.faults[1:]),
        counters_before={EVIL: {EVIL: 1}},
        counters_after={EVIL: {EVIL: 3}},
        lab_diff=(EVIL,),
        errors=(EVIL,),
    )

    html = report.render(finished(tmp_path, run).path).read_text(encoding="utf-8")

    parsed(html)
    assert html.count("<script") == 1
    assert "evil.example" not in html


def shown_of(directory):
    return " ".join(" ".join(parsed(report.render(directory.path).read_text(encoding="utf-8")).text).split())


def test_report_by_the_judging_code_does_not_mention_it(tmp_path):
    directory = finished(tmp_path, synthetic_run())

    shown = shown_of(directory)

    assert "Judged by" not in shown
    assert f"code {directory.read_environment().code}" in shown


@pytest.mark.parametrize(
    ("other", "who"),
    [
        ({"code": "aa01" * 4, "git": None}, "faultbed 0.0.9 (code aa01aa01)"),
        ({"code": "aa01" * 4, "git": "v0-dirty"}, "faultbed 0.0.9 (code aa01aa01, commit v0-dirty)"),
        ({"code": None, "git": "abc123"}, "faultbed 0.0.9 (commit abc123)"),
        ({"code": None, "git": None}, "faultbed 0.0.9 (code unknown)"),
        ({"code": None, "git": None, "faultbed": "unknown"}, "an unknown version of faultbed"),
    ],
)
def test_report_by_another_version_names_the_judging_version(tmp_path, other, who):
    """The verdict is of the old version, the measurements on the page are of the current one."""
    directory = finished(tmp_path, synthetic_run())
    here = directory.read_environment()
    directory.write_environment(msgspec.structs.replace(here, **({"faultbed": "0.0.9"} | other)))

    shown = shown_of(directory)

    assert f"Judged by {who} when it ran;" in shown
    assert f"are computed by faultbed {here.faultbed} (code {here.code[:8]}" in shown


def test_report_by_different_code_of_the_same_version_shows_it(tmp_path):
    directory = finished(tmp_path, synthetic_run())
    directory.write_environment(msgspec.structs.replace(directory.read_environment(), code="aa01" * 4))

    assert "(code aa01aa01" in shown_of(directory)


def test_report_command_names_the_judging_code_too(tmp_path):
    directory = finished(tmp_path, synthetic_run())

    def printed():
        done = CliRunner().invoke(cli, ["report", str(directory.path)], standalone_mode=False)
        assert done.exception is None, done.output
        return " ".join(done.output.split())

    assert "Judged by" not in printed()
    directory.write_environment(msgspec.structs.replace(directory.read_environment(), code="aa01" * 4))
    assert "(code aa01aa01" in printed()


def test_report_of_a_directory_that_is_no_run_is_rejected(tmp_path):
    with pytest.raises(UsageError, match="no such run"):
        report.render(tmp_path / "none")
    with pytest.raises(UsageError, match="finished run"):
        report.render(tmp_path)
    directory = finished(tmp_path, synthetic_run())
    (directory.path / "evidence/measured/workload.json").write_text("{}")
    with pytest.raises(UsageError, match="not as this version writes it"):
        report.render(directory.path)


def test_report_drawing_marks_every_kind_of_target():
    topology = soft_topology()
    targets = ["rtsw1:ctsw1", "rtsw1:host1:rxe0", "host3:rxe0", "host2:gpu0", "host4", "ctsw2", "nowhere"]
    marks = [Mark(number=i + 1, colour="#123456", target=target) for i, target in enumerate(targets)]

    svg = fabric_svg(topology, marks)

    parsed(svg)
    assert svg.count('class="badge"') == len(targets) - 1
    for name in (*topology.host_by_name, *topology.switch_by_name, "rack1", "rack2"):
        assert f">{name}</text>" in svg


def test_report_draws_atsws_above_ctsws_above_racks():
    topology = load(inventories() / "soft-zones.yml").topology
    layout = lay_out(topology)
    heights = {role: {layout.switches[x.name][1] for x in topology.switches if x.role == role} for role in ROLES}
    assert all(len(rows) == 1 for rows in heights.values())
    atsw, ctsw, rtsw = (min(heights[role]) for role in ("atsw", "ctsw", "rtsw"))
    assert atsw < ctsw < rtsw < layout.host_y
    assert len(set(layout.switches.values())) == len(topology.switches)
    parsed(fabric_svg(topology, []))


def test_report_draws_links_of_the_workload_thick():
    run = synthetic_run()

    svg = fabric_svg(run.lab.topology, [], run.workload.connections)

    assert "rtsw1:ctsw1: 1 queue pair of" in svg
    assert "rtsw1:host1:rxe1: 0 queue pairs of" in svg
    assert svg.count('class="link used"') == 8


@pytest.mark.usefixtures("drawn_anew")
def test_report_charts_have_no_placeholder_colour_and_no_fixed_size():
    run = synthetic_run()
    for chart in (goodput_chart(run, observe(run), []), iterations_chart(run, [])):
        for svg in (chart.wide, chart.narrow):
            assert not re.search(r"#(0[1-8])\1\1", svg)
            assert not re.search(r"<svg[^>]*(width|height)=", svg)
            assert "DejaVu" not in svg


@pytest.mark.parametrize(
    ("value", "bound", "unit", "text"),
    [
        (0.9996, 1.0, "ratio", "0.9996"),
        (8.0004, 8.0, "s", "8.0004 s"),
        (1.05000001, 1.05, "Gb/s", "1.05000001 Gb/s"),
        (0.1 + 0.2, 0.3, "ratio", "0.30000000000000004"),
        (1.0, 1.0, "ratio", "1"),
        (0.98, 1.0, "ratio", "0.98"),
        ("host2", "host2", "", "host2"),
        (None, 1.0, "ratio", "—"),
    ],
)
def test_observed_value_that_differs_from_its_bound_does_not_look_equal_to_it(value, bound, unit, text):
    """0.9996 of at least 1 used to be shown as 1, beside a FAIL."""
    check = Check(name="slo", verdict=Verdict.FAIL, observed=value, bound=bound, unit=unit, detail="")
    assert format_observed(check) == text
