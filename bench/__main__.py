"""Measure the numbers of docs/numbers.md: `make bench`, or `python -m bench [--cold] [PART ...]`.

Throughput is a ratio to perftest within one run, with its spread. Times of the lab are wall-clock seconds of this
machine; the first line of the output says on what machine they were measured, and no test asserts them. With `--cold`,
the part `lab` also boots and provisions the lab from nothing.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from bench import fail_slow as bench_fail_slow
from bench import fault_free as bench_fault_free
from bench import faults as bench_faults
from bench import model as bench_model
from bench import packets as bench_packets
from bench import predictions as bench_predictions
from bench import restarts as bench_restarts
from bench import starts as bench_starts
from bench import telemetry as bench_telemetry
from bench import traffic as bench_traffic
from bench.noise import calibration as bench_calibration
from bench.noise import decisions, noises
from bench.results import pages as bench_pages
from bench.results import query as bench_query
from bench.rows import MISSED, OPEN, REACHED, Row, mark, ratio
from bench.throughput import perftest as traffic_bench
from bench.throughput import taper as bench_taper
from faultbed.harness.cli.context import Session, json_option, styled
from faultbed.harness.cli.ending import end_with
from faultbed.harness.cli.options.names import lab_option
from faultbed.harness.ledger.statistics.level_tolerance import DECLARED
from faultbed.inject.fault_plan import plan as plan_fault
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.testbed.backends.lab_backend import backend_of
from faultbed.testbed.backends.soft import image, lifecycle
from faultbed.testbed.errors import FaultbedError, LabError
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.lab import Lab, open_lab
from faultbed.testbed.observe import counters, fingerprint
from faultbed.traffic import schedules
from faultbed.traffic.schedules import cost, schedule_check
from faultbed.traffic.workloads.elastic.machine import Mode

__all__ = ["main"]

COLUMNS = ("what", "median", "spread", "goal", "")
RESETS, RESUMES = 5, 3
"""Repetitions in the part `lab`."""
PARTS = (
    "packets",
    "soft-errors",
    "calibration",
    "schedule",
    "model",
    "query",
    "lab",
    "starts",
    "flow",
    "rate",
    "collective",
    "mpi",
    "telemetry",
    "lease",
    "faults",
)
SLOW = ("memory", "report", "taper", "predictions", "a-a", *bench_restarts.PARTS)
TTL_S = 10.0
LEASED_FAULTS: tuple[tuple[str, str, dict[str, float]], ...] = (
    ("link.flap", "rtsw1:ctsw1", {}),
    ("link.flap", "host1:rxe0", {}),
    ("packet.drop", "host1:rxe0", {"share": 0.5}),
    ("gpu.throttle", "host1:gpu0", {"percent": 50}),
)

_CONTROLLER = """
import json, sys, time
from pathlib import Path
from faultbed.inject.injector import Injector
from faultbed.inject.journal import Journal
from faultbed.inject.fault_plan import plan
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.testbed.lab import open_lab
kind, target, params, ttl = json.loads(sys.argv[2])
with open_lab(Path(sys.argv[1])) as lab, Journal(Path(sys.argv[3])) as journal:
    planned = plan(FaultSpec(kind=kind, target=target, for_s=300.0, params=params), lab.topology, lab_kind=lab.kind)
    with Injector(lab, journal, ttl_s=ttl) as injector:
        print("armed" if injector.prepare(planned).arm().ok else "failed", flush=True)
        time.sleep(300)
"""


@click.command()
@click.option("--cold", is_flag=True, help="In `lab`, also boot and provision the lab from nothing.")
@click.option("--drops", default=bench_faults.DROPS, show_default=True, help="Single packets to drop in `faults`.")
@click.option("--losses", default=bench_restarts.LOSSES, show_default=True, help="Jobs with losses in `restart-*`.")
@click.option("--pairs", default=bench_fault_free.PAIRS, show_default=True, help="Fault-free runs in `a-a`.")
@click.option(
    "--noise",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="In `calibration`, judge the noise that this Python file generates (bench/noise/decisions.py says how).",
)
@click.option("--n", "lengths", default="10,50,200", show_default=True, help="Values in each run of --noise.")
@click.option("--k", "counts", default="8,9,12,20", show_default=True, help="Runs, or pairs, of --noise.")
@click.option(
    "--trials", default=1000, show_default=True, type=click.IntRange(1), help="Trials of each row of --noise."
)
@click.option(
    "--machine", default="emulated", show_default=True, type=click.Choice(tuple(DECLARED)),
    help="Kind of machine whose level tolerance decides --noise.",
)  # fmt: skip
@click.option("--looks", is_flag=True, help="Decide pools of --noise as `run --until-decided` does.")
@json_option
@lab_option
@click.argument("parts", nargs=-1, type=click.Choice([*PARTS, *SLOW]))
def bench(
    *,
    cold: bool,
    drops: int,
    losses: int,
    pairs: int,
    noise: Path | None,
    lengths: str,
    counts: str,
    trials: int,
    machine: str,
    looks: bool,
    as_json: bool,
    lab: Path | None,
    parts: tuple[str, ...],
) -> None:
    """Measure PARTS of the bench.

    The default is all but those that take ten minutes or more: memory, report, taper, predictions, a-a,
    restart-*.

    `taper` and `predictions` need a lab with zones and rates: `--lab soft-zones`, or a copy of that inventory with
    another taper and name.
    """
    session = Session(lab)
    chosen = list(parts or PARTS)
    if noise is None and as_json:
        raise click.UsageError("--json gives the rows of one generator; add --noise FILE.py")
    if noise is not None:
        if chosen != ["calibration"]:
            raise click.UsageError("--noise is judged by one part; write: python -m bench calibration --noise FILE.py")
        rows = decisions.measure(
            decisions.load(noise),
            lengths=_numbers("--n", lengths, least=2),
            counts=_numbers("--k", counts, least=2),
            trials=trials,
            tolerance=DECLARED[machine],
            is_sequential=looks,
        )
        _show_noise(session, rows, as_json=as_json)
        return
    without_lab: dict[str, Callable[[], None]] = {
        "packets": lambda: _show(session, list(bench_packets.measure())),
        "soft-errors": lambda: _show(session, list(bench_fail_slow.measure())),
        "calibration": lambda: _calibration(session),
        "schedule": lambda: _show(session, list(_schedule()), columns=("what", "slowest", "which", "goal", "")),
        "model": lambda: _show(session, list(bench_model.measure()), columns=("what", "modelled", "", "goal", "")),
        "query": lambda: _show(session, list(bench_query.measure())),
    }
    for part, show in without_lab.items():
        if part in chosen:
            chosen.remove(part)
            show()
    if not chosen:
        return
    inventory = _start_lab(session)
    options = _Options(cold=cold, drops=drops, losses=losses, pairs=pairs)
    failed = [part for part in chosen if not _measure_part(session, inventory, part, options)]
    if failed:
        raise SystemExit(f"ended early by an error: {', '.join(failed)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """The command line's options of the same names."""

    cold: bool
    drops: int
    losses: int
    pairs: int


def _start_lab(session: Session) -> Inventory:
    inventory = session.inventory()
    backend_of(inventory.kind).check_can_start(inventory)
    with session.progress() as booting:
        lifecycle.up(inventory, booting)
    session.out.print(
        f"{inventory.name}: {len(lifecycle.vms(inventory))} VMs, {lifecycle.status(inventory).accelerator}, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} (on a busy machine the numbers have no meaning)"
    )
    return inventory


def _measure_part(session: Session, inventory: Inventory, part: str, options: _Options) -> bool:
    """Measure a part and print its rows; return False if an error ended the measurement early."""
    rows: list[Row] = []
    is_complete = True
    try:
        with session.progress() as progress:
            progress(f"measuring {part}")
            for row in _measures(inventory, options, progress)[part]():
                rows.append(row)
                progress(": ".join(row[:2]))
    except FaultbedError as error:
        is_complete = False
        session.err.print(f"{part}: {error}", soft_wrap=True)
    _show(session, rows)
    return is_complete


def _measures(
    inventory: Inventory, options: _Options, progress: Callable[[str], None]
) -> dict[str, Callable[[], Iterator[Row]]]:
    """Return, by part, the function that measures it on the lab."""
    on_lab = functools.partial(_on_lab, inventory)
    ends = bench_faults.ends(inventory.topology)

    def restarts(restart: Mode) -> Callable[[], Iterator[Row]]:
        return lambda: on_lab(lambda lab: bench_restarts.measure(lab, restart, progress, losses=options.losses))

    return {
        "lab": lambda: _lab(inventory, cold=options.cold),
        "starts": lambda: bench_starts.measure(inventory, progress),
        "flow": lambda: on_lab(lambda lab: _flow(lab, *ends)),
        "rate": lambda: on_lab(lambda lab: bench_traffic.measure_rates(lab, *ends)),
        "collective": lambda: on_lab(_collective),
        "mpi": lambda: _mpi(inventory, on_lab(lambda lab: bench_traffic.measure_mpi(lab, progress))),
        "memory": lambda: on_lab(bench_traffic.measure_memory),
        "telemetry": lambda: on_lab(lambda lab: bench_telemetry.measure(lab, *ends, progress)),
        "lease": lambda: _lease(inventory),
        "faults": lambda: on_lab(lambda lab: bench_faults.measure(lab, progress, drops=options.drops)),
        "report": lambda: bench_pages.measure(inventory, progress),
        "a-a": lambda: on_lab(lambda lab: bench_fault_free.measure(lab, progress, pairs=options.pairs)),
        "taper": lambda: on_lab(lambda lab: bench_taper.measure(lab, progress)),
        "predictions": lambda: bench_predictions.measure(inventory, progress),
        "restart-spare": restarts("spare"),
        "restart-shrink": restarts("shrink"),
        "restart-same": restarts("same"),
        "restart-ettr": lambda: on_lab(
            lambda lab: bench_restarts.measure_ettr(lab, progress, schedules=options.losses)
        ),
    }


def _on_lab(inventory: Inventory, measure: Callable[[Lab], Iterator[Row]]) -> Iterator[Row]:
    """Reset the lab, then yield the rows that `measure` yields on it."""
    lifecycle.reset(inventory, lambda _: None)
    with open_lab(inventory) as lab:
        yield from measure(lab)


def _show(session: Session, rows: Sequence[Row], *, columns: Sequence[str] = COLUMNS) -> None:
    colours = {REACHED: "green", MISSED: "red", OPEN: "yellow"}
    session.table(columns, [(*row[:-1], styled(row[-1], colours.get(row[-1], ""))) for row in rows])
    session.out.print()


def _calibration(session: Session) -> None:
    """Show in percent how often intervals lie wholly above or below the truth, and how often there is no interval."""
    rows, summary = [], []
    with session.progress() as progress:
        for of_metric, worst in bench_calibration.measure(progress):
            rows += of_metric
            summary.append(worst)
    session.out.print(
        "intervals wholly above / below the truth, in % of all series (and % of series without an interval)"
    )
    session.table(bench_calibration.COLUMNS, rows)
    session.out.print()
    _show(session, summary, columns=("wrong intervals, worst case", "above / below the truth", "", "goal", ""))
    _show(session, list(bench_calibration.measure_limits()), columns=("intervals", "", "", "goal", ""))
    for name, generator in noises.generators():
        rows_of_noise = decisions.measure(
            generator, lengths=(10, 40, 300), counts=(9, 12, 20), trials=500, tolerance=DECLARED["emulated"]
        )
        _show_noise(session, rows_of_noise, title=name)


def _numbers(option: str, text: str, *, least: int) -> tuple[int, ...]:
    """Return the numbers of a list such as `10,50,200`."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) >= least for part in parts):
        raise click.UsageError(f'{option}: "{text}" is no list of whole numbers from {least} on; write 10,50,200')
    return tuple(int(part) for part in parts)


def _show_noise(
    session: Session, rows: Iterator[decisions.NoiseRow], *, as_json: bool = False, title: str = "noise"
) -> None:
    """Show how often decisions on noise are wrong at the true value, and how often they decide beyond it."""
    shown = list(rows)
    if as_json:
        session.json([asdict(row) for row in shown])
        return
    beyond = [f"decided {percent} % beyond" for percent in decisions.BEYOND]
    session.table(
        (title, "n", "k", "wrong FAIL", "wrong PASS", "inconclusive", *beyond, f"{decisions.FAR:g} τ beyond", ""),
        [
            (
                f"{row.metric}, {row.of}",
                str(row.n),
                str(row.k),
                f"{row.wrong_fail:.1%}",
                f"{row.wrong_pass:.1%}",
                f"{row.inconclusive:.0%}",
                *(f"{share:.0%}" for share in row.decided.values()),
                f"{row.decided_far:.0%}",
                mark(reached=row.is_right),
            )
            for row in shown
        ],
    )
    session.out.print()


def _schedule() -> Iterator[Row]:
    """Yield the longest CPU time, over all collectives and algorithms, to check a schedule and to predict its time."""

    def checked(collective: str, algorithm: str) -> None:
        if faults := schedule_check.faults(
            schedules.build(collective, algorithm, schedules.Shape(ranks=1024, group=8))
        ):
            raise LabError(f"{collective} by {algorithm} is wrong: {faults[0]}")

    def predicted(collective: str, algorithm: str) -> None:
        schedule = schedules.build(collective, algorithm, cost.shape_for(24576, 1 << 30, group=8))
        cost.predict_ns(schedule, 1 << 30, cost.NETWORKS["rack"], group=8)

    for title, work, most in (
        ("build and check a schedule, 1,024 ranks", checked, 5),
        ("build a schedule and predict its time, 24,576 ranks", predicted, 10),
    ):
        cpu_s = {pair: _cpu_s(work, *pair) for pair in schedules.ALGORITHMS}
        slowest = max(cpu_s, key=cpu_s.__getitem__)
        slowest_text = f"{' by '.join(slowest)}, of {len(cpu_s)}"
        yield title, f"{cpu_s[slowest]:.2f} s CPU", slowest_text, f"<= {most} s", mark(reached=cpu_s[slowest] <= most)


def _lab(inventory: Inventory, *, cold: bool) -> Iterator[Row]:
    def nothing(_: str) -> None: ...

    if cold:
        lifecycle.purge(inventory)
        yield _row(
            "cold up, image cached (boot, provision, verify, snapshot)",
            [_timed(lifecycle.up, inventory, nothing)],
            "<= 150 s",
            150,
        )
    if built := image.cached():
        build_s = float((built.folder / "complete").read_text().split()[0])
        yield _row("image build (when it was built)", [build_s], "<= 120 s", 120)
    yield _row("reset", [_timed(lifecycle.reset, inventory, nothing) for _ in range(RESETS)], "<= 6 s", 6)
    resumes = []
    for _ in range(RESUMES):
        lifecycle.down(inventory)
        resumes.append(_timed(lifecycle.up, inventory, nothing))
    yield _row("up from the snapshot", resumes, "<= 10 s", 10)


def _flow(lab: Lab, src: str, dst: str) -> Iterator[Row]:
    for row in traffic_bench.against_perftest(lab, src=src, dst=dst):
        goal = 0.9 if row.message_bytes < 65536 else 0.95  # noqa: PLR2004 (the goals)
        yield ratio(f"goodput / ib_write_bw, {row.message_bytes} B, {row.qps} QP", row.ratios, goal)


def _mpi(inventory: Inventory, rows: Iterator[Row]) -> Iterator[Row]:
    yield from rows
    lifecycle.reset(inventory, lambda _: None)  # removes Open MPI's packages from the hosts


def _collective(lab: Lab) -> Iterator[Row]:
    yield from bench_traffic.measure_rings(lab)
    yield from bench_traffic.measure_spread(lab)


def _lease(inventory: Inventory) -> Iterator[Row]:
    for kind, target, params in LEASED_FAULTS:
        lifecycle.reset(inventory, lambda _: None)
        with open_lab(inventory) as lab:
            times_s = [_restored_after_kill(lab, kind, target, params)]
        yield _row(f"controller SIGKILLed during {kind} on {target}", times_s, f"<= {TTL_S + 2:.0f} s", TTL_S + 2)


def _restored_after_kill(lab: Lab, kind: str, target: str, params: dict[str, float]) -> float:
    """Return the seconds from SIGKILL of the controller until the lab reads as it did before the fault."""
    before = fingerprint.capture(lab)
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal.jsonl"
        request = json.dumps([kind, target, params, TTL_S])
        argv = [sys.executable, "-c", _CONTROLLER, str(lab.inventory), request, str(journal)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True) as controller:
            if controller.stdout is None or controller.stdout.readline() != b"armed\n":
                controller.kill()
                raise LabError(f"{kind} on {target} could not be armed")
            os.kill(controller.pid, signal.SIGKILL)
            started = time.monotonic()
            while not _is_restored(lab, kind, target, params):
                if time.monotonic() - started > 3 * TTL_S:
                    raise LabError(
                        f"{kind} on {target} is still there: {fingerprint.diff(before, fingerprint.capture(lab))}"
                    )
            return time.monotonic() - started


def _is_restored(lab: Lab, kind: str, target: str, params: dict[str, float]) -> bool:
    planned = plan_fault(FaultSpec(kind=kind, target=target, for_s=1.0, params=params), lab.topology, lab_kind=lab.kind)
    if kind == "packet.drop":
        node = lab.node(planned.target.link.a.node if planned.target.link else planned.target.node)
        return "faultbed_" not in node.run(["nft", "list", "tables"]).stdout
    readings = counters.read(lab, {key.partition("/")[0] for key, _ in planned.mechanism.restored})
    return all(
        readings[key.partition("/")[0]].get(key.partition("/")[2]) == value for key, value in planned.mechanism.restored
    )


def _cpu_s(work: Callable[..., object], *arguments: object) -> float:
    """Return the CPU time of a call in s, which depends little on the machine's load."""
    started = time.process_time()
    work(*arguments)
    return time.process_time() - started


def _timed(work: Callable[..., object], *arguments: object) -> float:
    """Return the wall-clock time of a call in s."""
    started = time.monotonic()
    work(*arguments)
    return time.monotonic() - started


def _row(title: str, seconds: Sequence[float], goal: str, most: float) -> Row:
    """Return a row about times in s whose median must be at most `most`; `goal` is the same in words."""
    middle = statistics.median(seconds)
    spread = f"{min(seconds):.1f}..{max(seconds):.1f} s, n={len(seconds)}"
    return title, f"{middle:.1f} s", spread, goal, mark(reached=middle <= most)


def main() -> None:
    """Entry point of `python -m bench`."""
    end_with(bench, "python -m bench")


if __name__ == "__main__":
    main()
