"""Sample the GPU's power while phases of a training job follow each other, and calibrate the power model with it.

    python tests/lab/gpu_day/square_wave.py OUT fma|matmul

Each cycle: three times compute and collective, then a checkpoint, compute, and a restart: the process is killed,
nothing runs for some seconds, a new process starts and loads its data. Written are the samples (Parquet; CSV without
pyarrow), a chart, and the levels and dips.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import day
import gpu_rank

from faultbed.harness.analysis.power.dips import ORDER, PhaseSpan, Sample, dips, energy_error, is_ordered, levels

CYCLES, EVERY_MS = 3, 20
SECONDS = {"compute": 2.0, "collective": 1.2, "checkpoint": 3.0, "restart": 4.0}
if day.REHEARSAL:
    SECONDS = dict.fromkeys(SECONDS, 0.7)
COLOURS = {"compute": "#4c78a8", "collective": "#f2cf5b", "checkpoint": "#e45756", "restart": "#72767c"}


class Sampler:
    def __init__(self, pcie):
        words = [sys.executable, "-m", "faultbed.testbed.node.gpu.power", pcie, str(EVERY_MS)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.samples = []
        self.thread = threading.Thread(target=self.read)
        self.thread.start()

    def read(self):
        self.samples.extend(json.loads(line) for line in self.process.stdout)

    def end(self):
        self.process.stdin.close()
        self.process.wait(10)
        self.thread.join(10)
        return self.samples


class Worker:
    def __init__(self, pcie, compute):
        words = [sys.executable, str(Path(__file__).with_name("load.py")), pcie, compute]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(self):
        line = self.process.stdout.readline()
        assert line, f"the load ended with {self.process.wait(5)}"
        return json.loads(line)

    def run(self, phase):
        self.process.stdin.write(json.dumps({"phase": phase, "seconds": SECONDS[phase]}) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def kill(self):
        self.process.kill()
        self.process.wait()


def wave(pcie, compute):
    """Run all cycles, and return the spans of their phases."""
    worker, spans = Worker(pcie, compute), []
    try:
        worker.answer()
        for cycle in range(CYCLES):
            phases = (*(("compute", "collective") * 3), "checkpoint", "compute")
            spans.extend({"cycle": cycle, "phase": phase, **worker.run(phase)} for phase in phases)
            start_ns = time.monotonic_ns()
            worker.kill()
            time.sleep(SECONDS["restart"])
            worker = Worker(pcie, compute)
            spans.append(
                {"cycle": cycle, "phase": "restart", "start_ns": start_ns, "end_ns": worker.answer()["ready_ns"]}
            )
    finally:
        worker.kill()
    return spans


def calibrated(samples, spans, power):
    """Return levels, dips and errors of a trace, by one of its columns (`instant_mw`, `average_mw`). Pure."""
    watts = [Sample(t_ns=row["t_ns"], watts=row[power] / 1000) for row in samples if row[power] is not None]
    phases = [PhaseSpan(**{name: span[name] for name in ("cycle", "phase", "start_ns", "end_ns")}) for span in spans]
    depths = dips(watts, phases)
    return {
        "levels": {phase: dataclasses.asdict(level) for phase, level in levels(watts, phases).items()},
        "dips_w": depths,
        "ordered": [is_ordered(depth) for depth in depths.values()],
        "energy_error": energy_error(watts, phases),
        "counter_error": counter_error(samples, power),
    }


def counter_error(samples, power):
    """Return by how much the integral of the power differs from the GPU's energy counter; None: it has none. Pure."""
    rows = [row for row in samples if row[power] is not None and row["energy_mj"] is not None]
    if len(rows) < 2 or rows[-1]["energy_mj"] == rows[0]["energy_mj"]:
        return None
    pairs = pairwise(rows)
    joules = sum((b["t_ns"] - a["t_ns"]) / 1e9 * (a[power] + b[power]) / 2000 for a, b in pairs)
    return joules / ((rows[-1]["energy_mj"] - rows[0]["energy_mj"]) / 1000) - 1


def changes_ms(samples, power):
    """Return the median time between two different readings: how often the GPU measures. Pure."""
    times = [b["t_ns"] for a, b in pairwise(samples) if a[power] != b[power]]
    gaps = [(b - a) / 1e6 for a, b in pairwise(times)]
    return median(gaps) if gaps else None


def store(name, samples, spans):
    """Write the trace; return the file's name."""
    try:
        from faultbed.harness.record import power_file
    except ImportError as error:
        print("no Parquet:", error)
        with (day.OUT / f"{name}.csv").open("w", newline="", encoding="ascii") as file:
            rows = csv.DictWriter(file, samples[0])
            rows.writeheader()
            rows.writerows(samples)
        day.save(f"{name}-spans.json", spans=spans)
        return f"{name}.csv"
    power_file.write(samples, spans, day.OUT / f"{name}.parquet", about=day.about())
    return f"{name}.parquet"


def chart(name, samples, spans):
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    about, start = day.about(), samples[0]["t_ns"]
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    axes = figure.subplots()
    for span in spans:
        ends = [(span[end] - start) / 1e9 for end in ("start_ns", "end_ns")]
        axes.axvspan(*ends, color=COLOURS[span["phase"]], alpha=0.3, linewidth=0)
    for power, style in (("instant_mw", "-"), ("average_mw", ":")):
        rows = [row for row in samples if row[power] is not None]
        axes.plot([(r["t_ns"] - start) / 1e9 for r in rows], [r[power] / 1000 for r in rows], f"k{style}", lw=0.9,
                  label=power)  # fmt: skip
    for phase, colour in COLOURS.items():
        axes.fill_between([], [], color=colour, alpha=0.3, label=phase)
    axes.set(xlabel="s", ylabel="W", ylim=(0, None))
    axes.set_title(f"{name}: {about['gpu']}, driver {about['driver']}, measurement: {about['measurement']}", loc="left")
    axes.legend(ncols=6, fontsize=8, loc="lower left")
    figure.savefig(day.OUT / f"{name}.png", dpi=90)


def try_chart(name, samples, spans):
    """Draw the chart last: it takes seconds, the trace is what counts, and the chart can be drawn later."""
    try:
        chart(name, samples, spans)
    except Exception as error:  # noqa: BLE001
        print("no chart:", repr(error))


def main():
    compute = sys.argv[2]
    name = f"power-{compute}"
    pcie = gpu_rank.first_pcie()
    sampler = Sampler(pcie)
    try:
        spans = wave(pcie, compute)
    finally:
        samples = sampler.end()
    if samples and "error" in samples[-1]:
        day.conclude([(samples[-1]["error"], False)])
    file = store(name, samples, spans)
    every_ms = median((b["t_ns"] - a["t_ns"]) / 1e6 for a, b in pairwise(samples))
    has_instant = any(row["instant_mw"] is not None for row in samples)
    results = {power: calibrated(samples, spans, power) for power in ("instant_mw", "average_mw")}
    first = results["instant_mw" if has_instant else "average_mw"]
    measured_ms = {power: changes_ms(samples, power) for power in results}
    day.save(
        f"{name}.json", results=results, every_ms=every_ms, changes_ms=measured_ms, samples=len(samples), file=file
    )
    for phase, level in first["levels"].items():
        print(f"{phase}: {level['watts']:.0f} W ({level['low']:.0f} to {level['high']:.0f}, n = {level['spans']})")
    for cycle, depths in first["dips_w"].items():
        words = ", ".join(f"{phase} {depths[phase]:.0f} W" for phase in ORDER if phase in depths)
        print(f"cycle {cycle}: dips of {words}")
    error, counter = first["energy_error"], first["counter_error"]
    day.conclude(
        [
            (f"{len(samples)} samples, one every {every_ms:.1f} ms; readings change every {measured_ms} ms",
             every_ms <= 100),
            (f"cycles with dips restart > checkpoint > collective: {sum(first['ordered'])} of {CYCLES}",
             len(first["ordered"]) == CYCLES and all(first["ordered"])),
            (f"energy of the last cycle, modelled by the others ÷ measured - 1: {error}",
             error is not None and abs(error) <= 0.1),
            (f"integral of the samples ÷ energy counter - 1: {counter}", counter is None or abs(counter) <= 0.1),
        ],
        then=lambda: try_chart(name, samples, spans),
    )  # fmt: skip


if __name__ == "__main__":
    main()
