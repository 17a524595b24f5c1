"""Run an experiment on the lab of `local_lab`, with the real injector, holders, threads and DIRTY mark.

The workload sends nothing. Usage: python local_run.py FOLDER
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import click
from local_lab import SOFT, Here, lab_at

from faultbed.harness.cli import ending
from faultbed.harness.record.rundir import RunDir
from faultbed.harness.run import loop
from faultbed.harness.run.faults import drive_faults
from faultbed.harness.run.run_record import RunRecord
from faultbed.inject.fault_plan import FaultSpec, plan
from faultbed.inject.injector import longest_lease_s
from faultbed.inject.journal import Journal

WORKLOAD_S = 1.6
FAULT_AT_S, FAULT_S = 0.3, 0.8


class Workload:
    """A workload that sends nothing, and ends after `WORKLOAD_S`."""

    def __init__(self) -> None:
        self.began_ns = self.started_ns = time.monotonic_ns()
        self.ended_ns, self.standstills = 0, ()
        self._is_over = threading.Event()
        self._timer = threading.Timer(WORKLOAD_S, self.stop)
        self._timer.daemon = True
        self._timer.start()

    @property
    def is_over(self) -> bool:
        return self._is_over.is_set()

    def stop(self) -> None:
        self.ended_ns = self.ended_ns or time.monotonic_ns()
        self._is_over.set()

    def wait(self, _timeout_s: float) -> None:
        while not self._is_over.wait(0.1):
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        time.sleep(0.2)  # the end of a real workload takes time, too


@contextlib.contextmanager
def fake_telemetry(*_, **__):
    yield SimpleNamespace(heard_ns=dict, without_log=list, stop=lambda: None)


def run(folder: Path) -> int:
    """Run an experiment with one fault, and return its exit code."""
    lab = lab_at(folder)
    loop._to_known_state = lambda *_: None
    loop.sealed_at_end = lambda *_: contextlib.nullcontext()
    loop.wants_twin = lambda *_, **__: False
    loop.telemetry.start = fake_telemetry
    loop.workload.start = lambda *_: Workload()
    loop.workload.paths_of = lambda *_: {}
    loop.workload.patience_s = lambda *_: 60.0
    loop.needs_baseline = lambda _: False
    drive_faults.LEAD_S = 0.3
    spec = FaultSpec(kind="link.down", target="host1:rxe0", for_s=FAULT_S)
    planned = plan(spec, SOFT.topology, lab_kind="soft")
    planned_fault = SimpleNamespace(
        id=planned.id, kind=planned.kind, target=planned.target.text,
        at_ns=int(FAULT_AT_S * 1e9), duration_ns=int(FAULT_S * 1e9),
    )  # fmt: skip
    decided = SimpleNamespace(
        experiment=SimpleNamespace(
            capture=(), probe=None, fabric=None, bystander=None, expectations=(), workload=SimpleNamespace(ranks=())
        ),
        plan=SimpleNamespace(workload="nothing", faults=(planned_fault,), is_control=False),
        faults=(replace(planned, at_s=FAULT_AT_S),),
    )  # fmt: skip
    result = RunRecord(run_dir=RunDir(folder / "run"), lease_s=longest_lease_s([planned]))
    with Here(folder).progress() as progress, Journal(folder / "run" / "journal.jsonl") as journal:
        loop._run_and_compare(decided, lab, journal, result, progress, None, lambda _: None)
    click.echo(f"lab {result.lab_state}; errors {result.errors}")
    return 5 if result.lab_state == "DIRTY" else 3 if result.errors else 0


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
def main(folder: Path) -> int:
    """Run the experiment in a folder and return its exit code."""
    return run(folder)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background processes with SIGINT ignored
    ending.end_with(main, "faultbed")
