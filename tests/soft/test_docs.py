"""Run the commands of the documentation that need a lab: each ends as its page promises. `documented.py` lists all."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from documented import FLAP, FLOW, HEAL, LONG, LOSS, ON_LAB, ON_LAB_READING, PROBE, RECORD, REPLAY
from terminals import check, environment, terminal, typed, working_directory

from faultbed.testbed.observe import fingerprint
from faultbed.testbed.tenancy import dirty

pytestmark = [pytest.mark.soft, pytest.mark.needs("hosts == 4", "uplinks == 2", "rnics == 2")]


@pytest.fixture
def folder(tmp_path_factory, tmp_path):
    return working_directory(tmp_path_factory.getbasetemp(), tmp_path)


@pytest.fixture
def once(request):
    """Run a test only in the first of several rounds."""
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("_round"):
        pytest.skip("long: once, however often the others are repeated")


def of_lab(lab):
    return environment(FAULTBED_LAB=str(lab.inventory.resolve()))


def test_documented_commands_that_only_read_the_lab(lab, folder, subtests):
    with ThreadPoolExecutor(max_workers=2) as pool:
        ends = {
            text: pool.submit(check, text, expected, folder, of_lab(lab)) for text, expected in ON_LAB_READING.items()
        }
    for text, end in ends.items():
        with subtests.test(command=text):
            end.result()


@pytest.mark.parametrize("text", ON_LAB, ids=str)
def test_documented_command_on_lab(text, lab, folder):
    try:
        check(text, ON_LAB[text], folder, of_lab(lab))
    finally:
        if ON_LAB[text].resets:
            lab.forget_connections()


@pytest.mark.slow
@pytest.mark.parametrize("text", LONG, ids=str)
def test_documented_long_command(once, text, lab, folder):
    try:
        check(text, LONG[text], folder, of_lab(lab), patience_s=800.0)
    finally:
        if LONG[text].resets:
            lab.forget_connections()


def test_documented_link_flap_under_a_flow(lab, folder):
    """In two terminals: the receipt has three parts, and the flow completes."""
    env = of_lab(lab)
    with terminal(FLOW, folder, env) as flow:
        flow.wait_for_output("arrived")  # the flow moves data; the fault must be armed in the remaining time
        with terminal(FLAP, folder, env) as fault:
            fault.wait_for_output("armed: ")
            assert not flow.is_over, "the flow was over before the link was down"
            assert fault.ends() == 0, fault.output()
        assert flow.ends() == 0, flow.output()
    assert "goodput[Gb/s]" in flow.output()
    assert re.findall(r"^(armed|fired|cleared) +yes", fault.output(), re.MULTILINE) == ["armed", "fired", "cleared"]


@pytest.mark.slow
def test_documented_probe_names_the_lossy_link(lab, folder):
    """In two terminals: probes name the link and its direction. No RNIC counts lost datagrams, so the fault is
    unproven."""
    env = of_lab(lab)
    with terminal(LOSS, folder, env) as fault:
        fault.wait_for_output("armed: ")
        code, output = typed(PROBE, folder, env)
        assert fault.ends() == 2, fault.output()
    assert code == 1, output
    assert re.search(r"rtsw2 -> host3:rxe1\b.* loses .* of the probes that cross it", output), output
    assert "not proved: no independent witness" in fault.output()


@pytest.mark.slow
def test_documented_recording_is_replayed(lab, folder):
    env = of_lab(lab)
    code, output = typed(RECORD, folder, env)
    assert (code, "operations in 4 files in all-reduce.trace" in output) == (0, True), output
    code, output = typed(REPLAY, folder, env)
    assert code == 0, output
    assert "operations, 5 times, in" in output
    assert " 0 wrong elements" in output


def test_documented_heal_repairs_a_dirty_lab(lab, folder):
    """`status` reports the lab as DIRTY, `heal` finds the leftover by its mark, and the lab accepts work again."""
    env, before = of_lab(lab), fingerprint.capture(lab)
    lab.node("rtsw1").run(["nft", "add", "table", "netdev", "faultbed_leftover"])
    dirty.mark(lab.state_dir, ["a table is new"], before)
    try:
        code, output = typed("faultbed status", folder, env)
        assert (code, "DIRTY" in output) == (0, True), output
        code, output = typed(HEAL, folder, env)
        assert code == 0, output
        assert "removed nft table faultbed_leftover" in output
        assert "1 reverted" in output
        assert not dirty.is_marked(lab.state_dir)
    finally:
        dirty.clean(lab.state_dir)
