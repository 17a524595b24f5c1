"""Run an experiment on the lab of `local_lab`, with the real injector, holders, threads and DIRTY mark.

The workload sends nothing. Usage: python local_run.py FOLDER
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import click
from local_lab import SOFT, Here, lab_at
from pass_stand_ins import setting_of
from planned_faults import planned_at

from faultbed.harness.cli import ending
from faultbed.harness.experiment import run_plan
from faultbed.harness.experiment.experiment_file import decode
from faultbed.harness.parts.faults import drive_faults
from faultbed.harness.parts.telemetry import telemetry_part
from faultbed.harness.record.rundir import RunDir
from faultbed.harness.run import loop
from faultbed.harness.run.prepare.bind_to_lab import fit
from faultbed.harness.run.run_record import RunRecord
from faultbed.inject.fault_plan import plan
from faultbed.inject.injector import longest_lease_s
from faultbed.inject.journal import Journal
from faultbed.inject.kinds.fault_spec import FaultSpec

EXPERIMENT = b"""
name = "x"
[workload]
collective = "all-reduce"
size = "1MiB"
duration = "5s"
[[faults]]
kind = "link.down"
target = "host1:rxe0"
at = "300ms"
for = "800ms"
"""
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
    telemetry_part.telemetry.start = fake_telemetry
    loop.workload.start = lambda *_: Workload()
    loop.workload.paths_of = lambda *_: {}
    loop.workload.patience_s = lambda *_: 60.0
    drive_faults.LEAD_S = 0.3
    spec = FaultSpec(kind="link.down", target="host1:rxe0", for_s=FAULT_S)
    planned = plan(spec, SOFT.topology, lab_kind="soft")
    experiment = decode(EXPERIMENT, source="x.toml")
    decided = run_plan.plan(fit(experiment, SOFT.topology, "soft"), inventory_digest="9f" * 32, version="0")
    with Here(folder).progress() as progress, Journal(folder / "run" / "journal.jsonl") as journal:
        setting = setting_of(
            experiment=experiment, plan=decided, faults=(planned_at(planned, FAULT_AT_S),), lab=lab, journal=journal,
            run_dir=RunDir(folder / "run"), progress=progress,
        )  # fmt: skip
        result = RunRecord(setting=setting, lease_s=longest_lease_s([planned]))
        loop._run_and_compare(result, lambda _: None)
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
