"""SIGUSR1 writes the flight recorders of a running workload to a file; the run continues undisturbed."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
from engine_labs import Lab, RankEngine, RankLab
from local_collective import start

from faultbed.harness.cli.traffic import flows_and_collectives
from faultbed.harness.cli.traffic.flows_and_collectives import progress_reporter
from faultbed.harness.record import rundir
from faultbed.harness.run import flight_dump
from faultbed.traffic.engine import dump_signal
from faultbed.traffic.engine.flight_recorder import Flight
from faultbed.traffic.workloads import collective


@pytest.fixture(autouse=True)
def _handler():
    dump_signal.take_request()
    before = signal.signal(signal.SIGUSR1, dump_signal.request_dump)
    yield
    signal.signal(signal.SIGUSR1, before)
    dump_signal.take_request()


class ProgressLines:
    """Progress lines in a queue; `until` waits for a line with the given words."""

    def __init__(self):
        self.lines = queue.Queue()

    def __call__(self, text):
        self.lines.put(text)

    def until(self, words):
        actual, deadline = [""], time.monotonic() + 20
        while words not in actual[-1]:
            assert time.monotonic() < deadline, actual
            with contextlib.suppress(queue.Empty):  # signal handlers run on this thread, between waits
                actual.append(self.lines.get(timeout=0.1))
        return actual[1:]


def ask():
    os.kill(os.getpid(), signal.SIGUSR1)


def run_with(progress, folder, lab, **change):
    spec = collective.CollectiveSpec(algorithm="ring", iterations=1, **change)
    return collective.start(lab, spec, on_event=flight_dump.writer(folder, flight_dump.STEM, progress))


def test_flight_dump_is_written_and_does_not_affect_the_run(tmp_path):
    progress, lab = ProgressLines(), RankLab(lambda engine: None)
    running = run_with(progress, tmp_path, lab)
    ask()
    lines = progress.until("flights-requested-1.json")
    assert lines[0] == "rank 0 on host1:rxe0: iteration 3, step 2: waits for segment 1 of 4 from rank 1 (QP 9, lost)"
    assert lines[-1] == f"flight recorders of 4 ranks: {tmp_path}/flights-requested-1.json"
    ask()
    progress.until("flights-requested-2.json")
    decoded = msgspec.json.decode((tmp_path / "flights-requested-1.json").read_bytes(), type=tuple[Flight, ...])
    assert [flight.rank for flight in decoded] == [0, 1, 2, 3]
    assert decoded[1].entries[0].psn == 256
    for engine in lab.engines:
        engine.over()
    result = running.wait(10)
    assert (result.outcome, result.flights) == ("completed", ()), "those of a run that failed are another thing"


def test_flight_dump_by_the_api_is_not_a_failure_dump():
    lab = RankLab(lambda engine: None)
    running = start(None, lab=lab)
    assert len(running.dump()) == 4
    for engine in lab.engines:
        engine.over()
    assert running.wait(10).flights == ()


def test_flight_dump_during_warmup_before_the_run_has_a_handle(tmp_path):
    progress, lab, made = ProgressLines(), RankLab(lambda engine: ask() if engine.host == "host1" else None), []
    thread = threading.Thread(target=lambda: made.append(run_with(progress, tmp_path, lab, warmup=1)), daemon=True)
    thread.start()
    progress.until("flights-requested-1.json")
    assert not made
    for engine in lab.engines:
        engine.do_quit()
    thread.join(20)
    assert made[0].wait(20).outcome == "failed"


class Mute(RankEngine):
    def do_dump(self, task):
        if self.host != "host3":
            super().do_dump(task)


class MuteLab(RankLab):
    engine = Mute


def test_flight_dump_names_ranks_that_do_not_answer_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr("faultbed.traffic.engine.running_traffic.DUMP_TIMEOUT_NS", 300_000_000)
    monkeypatch.setattr(
        "faultbed.traffic.engine.running_traffic.POSTMORTEM_TIMEOUT_S", 0.3
    )  # when the run is abandoned
    progress = ProgressLines()
    with run_with(progress, tmp_path, MuteLab(lambda engine: None)):
        ask()
        lines = progress.until("flights-requested-1.json")
    assert "no reply from host3:rxe0" in lines
    assert lines[-1].startswith("flight recorders of 3 ranks")


def test_flight_dump_of_a_flow_or_to_an_unwritable_path_does_not_end_the_run(tmp_path):
    progress = ProgressLines()
    running = Lab(lambda engine: None).start(flight_dump.writer(tmp_path, flight_dump.STEM, progress))
    ask()
    progress.until("this workload has none")
    running.stop()
    assert running.wait(10).outcome == "completed"
    assert not list(tmp_path.iterdir())
    running = run_with(progress, tmp_path / "absent", RankLab(lambda engine: None))
    ask()
    assert "No such file" in progress.until("flight recorders of 4 ranks")[-1]
    assert not running.is_over
    running.abort("enough")
    running.wait(20)


def test_flight_dump_of_a_command_is_written_to_its_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    progress = ProgressLines()
    report = progress_reporter(SimpleNamespace(heartbeat=lambda: None), progress)
    report({"event": "flights", "time_ns": 0, "silent": [], "flights": [
        Flight(rank=0, endpoint="host1:rxe0", standing="iteration 1, compute", entries=())]})  # fmt: skip
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("flights-requested-2")
    assert json.loads(path.read_bytes())[0]["standing"] == "iteration 1, compute"
    assert str(path) in progress.until("recorders of 1")[-1]


def test_progress_shows_no_amount_before_the_first_sample(monkeypatch):
    monkeypatch.setattr(flows_and_collectives, "REPORT_EVERY_S", -1.0)
    lines = []
    report = progress_reporter(SimpleNamespace(heartbeat=lambda: None), lines.append)
    report({"event": "ready"})
    report({"event": "sample", "sizes": [1_000_000, 500_000]})
    report({"event": "iteration", "index": 2})
    assert lines == ["running", "1.5 MB arrived", "3 iterations, 1.5 MB arrived"]


@pytest.mark.process
def test_command_line_handles_sigusr1_instead_of_dying():
    """The signal's default action ends a process; a command without ranks must ignore it."""
    code = (
        "import os, signal, sys\n"
        "from faultbed.harness.cli import main as entry\n"
        "from faultbed.harness.cli.context import Session\n"
        "Session.table = lambda *_, **__: os.kill(os.getpid(), signal.SIGUSR1)\n"
        "sys.argv = ['faultbed', 'faults']\n"
        "entry()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_run_directory_keeps_requested_dumps_apart_from_failure_dumps(tmp_path):
    flights = (Flight(rank=0, endpoint="host1:rxe0", standing="iteration 1, compute", entries=()),)
    rundir.write_flights(tmp_path / "flights-requested-1.json", flights)
    assert rundir.open_run(tmp_path).read_flights() == ()
