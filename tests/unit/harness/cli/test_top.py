"""The live view: one frame from the samples, in any terminal; it ends on its own even if machines fall silent."""

from __future__ import annotations

import io
import signal
import threading

import pytest
from click.testing import CliRunner
from recorded import RECORDED
from rich.console import Console
from watched_lab import Watched

from faultbed.harness.cli.lab import watching
from faultbed.harness.cli.lab.screen import SILENT_NS, Screen
from faultbed.harness.cli.main import cli
from faultbed.testbed.observe.telemetry import Change, Sample

S = 1_000_000_000
BEGAN = 50 * S
PORTS = {f"host{number}": f"be{number % 2}.tx_bytes" for number in range(1, 9)}


def snapshot():
    """Return a lab of eight hosts, each sending 125 MB/s more than the previous; one lost packets, one link is down."""
    screen = Screen(began_ns=BEGAN)
    for at_s in range(3):
        for number, (host, port) in enumerate(PORTS.items(), start=1):
            values = {port: number * 125_000_000 * at_s, "lo.tx_bytes": 10**12 * at_s, "rxe0.out_of_seq_request": 0}
            if host == "host3":
                values["rxe0.out_of_seq_request"] = 61 * at_s
            screen.sample(Sample(at_ns=BEGAN + at_s * S, node=host, values=values))
    screen.change(Change(at_ns=BEGAN + 2 * S, node="rtsw1", subject="link ctsw1", text=None))
    screen.change(Change(at_ns=BEGAN + 2 * S, node="host2", subject="kernel", text="3 [rxe0] bad/[bold]things[/bold]"))
    return screen


def rendered(screen, *, width, rows=40, now_ns=BEGAN + 2 * S, heard_ns=None):
    console = Console(width=width, height=rows, file=io.StringIO(), force_terminal=False)
    console.print(screen.table(rows, now_ns=now_ns, heard_ns=heard_ns or {}))
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_top_frame_fits_the_terminal_and_shows_rates_trouble_and_changes(width):
    lines = rendered(snapshot(), width=width)
    text = "\n".join(lines)
    assert max(len(line) for line in lines) <= width
    assert len(lines) == 2 + len(PORTS) + 1 + 2, "nothing is wrapped"
    rates = [line for line in lines if "Gb/s" in line]
    assert [line.split()[0] for line in rates] == [f"host{number}" for number in range(8, 0, -1)]
    assert [line.split()[2] for line in rates] == [str(number) for number in range(8, 0, -1)]
    assert "lo.tx" not in text
    assert any("host3" in line and "+122" in line for line in lines)
    if width >= 80:
        assert "2.00 s  rtsw1: link ctsw1 is gone" in text
        assert "bad/[bold]things[/bold]" in text, "what a kernel writes is no markup of ours"


def test_top_short_terminal_keeps_the_busiest_ports_and_the_changes():
    lines = rendered(snapshot(), width=80, rows=14)
    rates = [line.split()[0] for line in lines if "Gb/s" in line]
    assert rates == ["host8", "host7", "host6", "host5"]
    assert any("link ctsw1 is gone" in line for line in lines)


def test_top_error_counters_do_not_push_changes_off_the_screen():
    screen = snapshot()
    for number in range(40):
        for at_s in range(2):
            values = {"rxe0.send_err": number * at_s}
            screen.sample(Sample(at_ns=BEGAN + at_s * S, node=f"other{number}", values=values))
    lines = rendered(screen, width=80, rows=24)
    assert len(lines) <= 26
    assert any("more error counters" in line for line in lines)
    assert any("link ctsw1 is gone" in line for line in lines)


def test_top_marks_a_machine_silent_instead_of_its_ports_idle():
    heard = {"host1": BEGAN + 2 * S, "fabric": BEGAN}
    quiet = rendered(snapshot(), width=60, heard_ns=heard)
    assert not any("silent" in line for line in quiet)
    late = rendered(snapshot(), width=60, now_ns=BEGAN + SILENT_NS + S, heard_ns=heard)
    (line,) = [line for line in late if "silent" in line]
    assert line.split()[0] == "fabric"
    assert "no telemetry for 11 s" in line
    assert not any("Gb/s" in line for line in late)


def test_top_shows_a_recorded_run():
    screen = Screen(began_ns=RECORDED.samples[0].at_ns)
    for sample in RECORDED.samples:
        screen.sample(sample)
    for change in RECORDED.changes:
        screen.change(change)
    lines = rendered(screen, width=100, now_ns=RECORDED.samples[-1].at_ns)
    assert any("is gone" in line or "link" in line for line in lines)
    assert any("+" in line for line in lines)


def top(monkeypatch, lab, *arguments):
    monkeypatch.setattr(watching, "open_lab", lambda _inventory: lab)
    return CliRunner().invoke(cli, ["top", *arguments], standalone_mode=False)


def test_top_ends_after_its_duration(monkeypatch):
    done = top(monkeypatch, Watched(), "--for", "1.5")
    assert done.exception is None
    assert "node" in done.output
    assert "Ctrl-C to stop" in done.output


def test_top_survives_a_machine_that_stops_answering(monkeypatch):
    """A watcher is killed during the view: the view continues and ends on time."""
    lab = Watched()
    has_sample = threading.Event()
    frames = []

    class KillingScreen(Screen):
        def sample(self, one):
            super().sample(one)
            if not has_sample.is_set():
                has_sample.set()
                lab.channels[0].process.send_signal(signal.SIGKILL)

        def table(self, rows, *, now_ns, heard_ns):
            frames.append(now_ns)
            # Add the time after which a machine counts as silent, so that the test need not wait for it.
            return super().table(rows, now_ns=now_ns + SILENT_NS, heard_ns=heard_ns)

    monkeypatch.setattr(watching, "Screen", KillingScreen)
    done = top(monkeypatch, lab, "--for", "2.5")
    assert done.exception is None, done.exception
    assert has_sample.is_set()
    assert len(frames) >= 3
    assert "silent" in done.output


def test_top_ends_on_ctrl_c(monkeypatch):
    frames = []

    class Pressed(Screen):
        def table(self, rows, **times):
            frames.append(rows)
            if len(frames) == 1:
                raise KeyboardInterrupt
            return super().table(rows, **times)

    monkeypatch.setattr(watching, "Screen", Pressed)
    assert top(monkeypatch, Watched()).exception is None
    assert len(frames) == 2, "the last frame is shown"
