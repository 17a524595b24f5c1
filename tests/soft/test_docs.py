"""Run the commands of the documentation: each ends as its page promises. `documented.py` lists them all."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import stand_ins
from documented import FLAP, FLOW, HEAL, LONG, LOSS, NO_LAB, ON_LAB, PROBE, RECORD, REPLAY
from house import HOUSE
from pages import NAMED
from waiting import until

from testbed.observe import fingerprint
from testbed.tenancy import dirty

pytestmark = [pytest.mark.soft, pytest.mark.needs("hosts == 4", "uplinks == 2", "rnics == 2")]

PATIENCE_S = 120.0


@pytest.fixture(scope="session")
def house(tmp_path_factory):
    made = tmp_path_factory.mktemp("house")
    stand_ins.make(made)
    return made


@pytest.fixture
def folder(house, tmp_path):
    """Return a working directory for the commands, which is neither the checkout nor used by another test."""
    return Path(shutil.copytree(house, tmp_path / "here", symlinks=True))


@pytest.fixture
def once(request):
    """Run a test only in the first of several rounds."""
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("_round"):
        pytest.skip("long: once, however often the others are repeated")


def argv(text, folder):
    """Return the arguments of a line as a shell would, with placeholders replaced and patterns expanded."""
    words = [NAMED.get(word, word) for word in shlex.split(text)]
    assert words[0] == "faultbed"
    meant = [_files(word, folder) if "*" in word else [word] for word in words[1:]]
    return [sys.executable, "-c", "from harness.console import main; main()", *itertools.chain.from_iterable(meant)]


def _files(pattern, folder):
    actual = sorted(str(path.relative_to(folder)) for path in folder.glob(pattern))
    assert actual, pattern
    return actual


def environment(**more):
    path = os.pathsep.join(filter(None, [str(HOUSE), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "COLUMNS": "200", "PYTHONPATH": path, **more}


def of_lab(lab):
    return environment(FAULTBED_LAB=str(lab.inventory.resolve()))


@dataclass(frozen=True, kw_only=True)
class Terminal:
    """A running command, and the file with its output."""

    process: subprocess.Popen
    log: Path

    @property
    def is_over(self):
        return self.process.poll() is not None

    def output(self):
        return self.log.read_text(errors="replace")

    def wait_for_output(self, word):
        """Wait until the command has printed this text."""
        until(lambda: word in self.output() or self.is_over, within_s=PATIENCE_S)
        assert word in self.output(), self.output()

    def ends(self):
        return self.process.wait(PATIENCE_S)


@contextlib.contextmanager
def terminal(text, folder, env):
    """Start a command. At the end of the block it is interrupted, if it still runs."""
    log = folder / f"said-{len(list(folder.glob('said-*')))}"
    with log.open("w") as file:
        process = subprocess.Popen(
            argv(text, folder), stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=folder, env=env
        )
    try:
        yield Terminal(process=process, log=log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def typed(text, folder, env, *, patience_s=PATIENCE_S):
    """Run a command to its end; return its exit code and its output."""
    with terminal(text, folder, env) as one:
        return one.process.wait(patience_s), one.output()


def check(text, expected, folder, env, **patience):
    code, output = typed(f"{text} {expected.more}", folder, env, **patience)
    assert code in expected.codes, output
    assert expected.says in output, output
    assert not expected.makes or list(folder.glob(expected.makes)), output
    assert "Traceback" not in output


@pytest.mark.parametrize("text", NO_LAB, ids=str)
def test_documented_command_without_lab(text, folder):
    env = environment(FAULTBED_HOME=str(folder / "home"))
    env.pop("FAULTBED_LAB", None)
    check(text, NO_LAB[text], folder, env)


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
    """In two terminals: the receipt has three parts, and the flow completes. Half of its documented minute suffices."""
    env = of_lab(lab)
    with terminal(f"{FLOW} --for 30s", folder, env) as flow:
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
    assert re.search(r"rtsw2 -> host3:rxe1\b.* loses .* of what crosses it", output), output
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
