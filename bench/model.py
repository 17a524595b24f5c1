"""Part `model` of the bench: the numbers of the model that need no lab, each with its bound.

Times are CPU seconds of this process; peak memory is that of a separate process. Numbers that need runs of a soft lab
are not here: the error of a calibration, and of predictions for other experiments.
"""

from __future__ import annotations

import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

from bench.packet_level import last_flow_s, mean_stretch, read, ring_job_s
from bench.rows import Row, mark
from faultbed.harness.analysis.prediction import max_over_mean
from faultbed.harness.model.dcqcn import Settings, simulate
from faultbed.harness.model.preset_fabric import PRESETS, PresetFabric
from faultbed.harness.model.step_power import H100_WATTS, Interval, dips_by_phase, power_trace
from faultbed.harness.model.training_step import (
    LLAMA3_405B,
    PUBLISHED,
    PUBLISHED_TFLOPS,
    Layout,
    Placement,
    calibrated_micro_batch_s,
    step_time,
)
from faultbed.testbed.routing.max_min import completion_times, loads_of_paths, max_min_rates

__all__ = ["bisection", "measure", "random_mmr"]

LARGE = PresetFabric(name="100k", zones=8, racks=784)
ZONE = PresetFabric(name="zone", zones=1, racks=64)


def measure() -> Iterator[Row]:
    """Yield the rows."""
    yield from _speed()
    yield from _correctness()
    yield from _packet_level()
    yield from _random_loads()
    yield from _llama()
    yield from _congestion()
    yield _power()


def _speed() -> Iterator[Row]:
    measured = subprocess.run(
        [sys.executable, "-c", "from bench.model import rates_of_llama; rates_of_llama()"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    cpu_s, added_mb = float(measured[0]), float(measured[1])
    yield _most("24,576 x 16 queue pairs: paths and rates", cpu_s, 2, "s CPU")
    yield _most("the same: memory", added_mb, 500, "MB")
    placements: tuple[tuple[Placement, float], ...] = (("ordered", 3), ("random", 10))
    for placement, most in placements:
        cpu_s = _cpu_s(lambda placement=placement: _step(placement))  # type: ignore[misc]
        yield _most(f"step of llama3-24k, {placement} placement", cpu_s, most, "s CPU")
    yield _most("100,352 x 4 queue pairs: paths and rates", _cpu_s(lambda: _permutation_rates(LARGE, 4)), 2, "s CPU")


def rates_of_llama() -> None:
    """Print the CPU time and the memory that paths and rates of a permutation on llama3-24k take."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu_s = _cpu_s(lambda: _permutation_rates(PRESETS["llama3-24k"], 16))
    sys.stdout.write(f"{cpu_s} {(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024}\n")


def _cpu_s(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def _permutation_rates(fabric: PresetFabric, qps: int, *, seed: int = 1) -> np.ndarray:
    """Return the rate of each queue pair, in bytes per second, if each GPU sends to another one at random."""
    rng = np.random.default_rng(seed)
    src, dst = np.repeat(np.arange(fabric.gpus), qps), np.repeat(rng.permutation(fabric.gpus), qps)
    rates: np.ndarray = max_min_rates(loads_of_paths(fabric.hashed_hops(src, dst, rng)), fabric.capacity)
    return rates


def _step(placement: Placement) -> object:
    layout = Layout(dp=192, micro_batches=16)
    return step_time(LLAMA3_405B, layout, PRESETS["llama3-24k"], micro_batch_s=0.34, placement=placement)


def _correctness() -> Iterator[Row]:
    equal = sum(_equals_scalar(np.random.default_rng(seed)) for seed in range(300))
    yield "random graphs equal to scalar filling", f"{equal} of 300", "", "300", mark(reached=equal == 300)  # noqa: PLR2004
    exact = {
        "parking lot": _rates([[0, 1, 2], [0, -1, -1], [1, -1, -1], [2, -1, -1]], [1, 2, 3]) == [0.5, 0.5, 1.5, 2.5],
        "8:1 incast": _rates([[sender, 8] for sender in range(8)], [400.0] * 9) == [50.0] * 8,
        "released capacity": _ends() == [3, 5, 6],
        "7:1": np.allclose(_rates([[at, 14 + at, 28] for at in range(14)], [1.0] * 28 + [2.0]), 1 / 7),
        "odd/even x 2": _odd_even((1, 2, 3, 5)) == 2 * _odd_even((1, 2, 3, 4)),
    }
    wrong = ", ".join(name for name, right in exact.items() if not right)
    yield "hand solutions", wrong or ", ".join(exact), "", "exact", mark(reached=not wrong)


def _rates(paths: list[list[int]], capacity: list[float]) -> list[float]:
    rates: list[float] = max_min_rates(loads_of_paths(np.array(paths, dtype=np.int32)), np.array(capacity)).tolist()
    return rates


def _ends() -> list[float]:
    loads = loads_of_paths(np.zeros((3, 1), dtype=np.int32))
    ends: list[float] = completion_times(loads, np.ones(1), [1, 2, 3], grid=0).tolist()
    return ends


def _odd_even(job: tuple[int, ...]) -> float:
    """Return the time of an all-to-all over servers in racks of two, whose switches choose an uplink by parity."""
    racks = {server: (server - 1) // 2 for server in job}
    paths = [
        [2 * racks[src] + dst % 2, 6 + 2 * racks[dst] + dst % 2]
        for src in job
        for dst in job
        if racks[src] != racks[dst]
    ]
    loads = loads_of_paths(np.array(paths, dtype=np.int32))
    return float(completion_times(loads, np.ones(12), np.ones(len(paths))).max())


def _equals_scalar(rng: np.random.Generator) -> bool:
    links, flows = int(rng.integers(2, 9)), int(rng.integers(1, 25))
    width = min(int(rng.integers(1, 4)), links)
    paths = [[int(link) for link in rng.choice(links, size=width, replace=False)] for _ in range(flows)]
    capacity = [float(value) for value in rng.uniform(0.5, 5, links)]
    return bool(np.allclose(_rates(paths, capacity), _scalar(paths, capacity), rtol=1e-9))


def _scalar(paths: list[list[int]], capacity: list[float]) -> list[float]:
    """Return rates by progressive filling, one saturated link at a time."""
    left, live, rates = list(capacity), set(range(len(paths))), [0.0] * len(paths)
    while live:
        counts = {link: sum(link in paths[flow] for flow in live) for link in range(len(left))}
        shares = {link: left[link] / count for link, count in counts.items() if count}
        tightest = min(shares, key=shares.__getitem__)
        for flow in [flow for flow in live if tightest in paths[flow]]:
            rates[flow] = shares[tightest]
            live.discard(flow)
            for link in paths[flow]:
                left[link] -= shares[tightest]
    return rates


def _packet_level() -> Iterator[Row]:
    for name in ("perm1", "perm4", "incast8", "ring4"):
        record = read(name)
        error = last_flow_s(record) / float(record.seconds.max()) - 1
        stretch = f"flows took {mean_stretch(record):.2f} times as long on average (PFC is not in it)"
        yield f"packet level, {name}: last flow", f"{error:+.1%}", stretch, "25 %", mark(reached=abs(error) <= 0.25)  # noqa: PLR2004
    for name in ("ar1", "ar4"):
        record = read(name)
        error = ring_job_s(record) / float(record.seconds.max()) - 1
        yield f"packet level, {name}: ring of 12 steps", f"{error:+.1%}", "", "10 %", mark(reached=abs(error) <= 0.10)  # noqa: PLR2004


def random_mmr() -> float:
    """Return the median maximum over mean of 1,000 flows that each take one of 16 links at random."""
    return max_over_mean(1000, 16)[1]


def bisection(qps: int, *, draws: int = 3) -> float:
    """Return the mean rate of flows from each GPU of a zone to one in the zone's other half, over the RNIC's rate."""
    shares = []
    for seed in range(draws):
        rng = np.random.default_rng(seed)
        order = rng.permutation(ZONE.gpus)
        half = ZONE.gpus // 2
        src = np.repeat(order, qps)
        dst = np.repeat(np.concatenate((order[half:], order[:half])), qps)
        rates = max_min_rates(loads_of_paths(ZONE.hashed_hops(src, dst, rng)), ZONE.capacity)
        shares.append(float(rates.sum()) / ZONE.gpus / (ZONE.gbps * 1e9 / 8))
    return float(np.mean(shares))


def _random_loads() -> Iterator[Row]:
    mmr = random_mmr()
    yield (
        "MMR of 1,000 flows on 16 links",
        f"{mmr:.2f}",
        "",
        "1.23",
        mark(reached=math.isclose(mmr, 1.23, abs_tol=0.02)),
    )
    shares = {qps: bisection(qps) for qps in (1, 4, 16)}
    text = ", ".join(f"{share:.2f}" for share in shares.values())
    ordered = list(shares.values()) == sorted(shares.values())
    yield "bisection of a zone, QP 1, 4, 16", text, "prototype: 0.51, 0.81, 0.95", "1 < 4 < 16", mark(reached=ordered)


def _llama() -> Iterator[Row]:
    fabric = PRESETS["llama3-24k"]
    measured = step_time(LLAMA3_405B, PUBLISHED, fabric, micro_batch_s=1.0)
    errors = []
    for exposed_s in (0.0, measured.pp_s + measured.dp_s):
        time_s = calibrated_micro_batch_s(LLAMA3_405B, PUBLISHED, tflops=PUBLISHED_TFLOPS, exposed_s=exposed_s)
        step = step_time(LLAMA3_405B, Layout(dp=128, micro_batches=16), fabric, micro_batch_s=time_s)
        errors.append(step.tflops(step.most_s if exposed_s else step.least_s) / 400 - 1)
    worst = max(map(abs, errors))
    text = ", ".join(f"{error:+.1%}" for error in errors)
    note = "communication overlaps, or not"
    yield "Llama 3: 8,192 GPUs predict 16,384", text, note, "5 %", mark(reached=worst <= 0.05)  # noqa: PLR2004


def _congestion() -> Iterator[Row]:
    outcomes = simulate([Settings(flows=flows) for flows in (2, 4, 8)])
    for outcome in outcomes:
        deviation = max(1 - outcome.least_share, outcome.most_share - 1)
        name = f"DCQCN, {outcome.settings.flows} flows"
        yield f"{name}: share over 100 ms", f"±{deviation:.1%}", "", "10 %", mark(reached=deviation <= 0.10)  # noqa: PLR2004
        ratio = outcome.queue_mean_bytes / (outcome.fixed_point_bytes or math.nan)
        yield f"{name}: queue / fixed point", f"{ratio:.2f}", "", "0.8 to 1.3", mark(reached=0.8 <= ratio <= 1.3)  # noqa: PLR2004


def _power() -> Row:
    rng = np.random.default_rng(1)
    ordered = 0
    for _ in range(20):
        steps: list[Interval] = [("compute", float(rng.uniform(0.5, 8))), ("collective", float(rng.uniform(0.2, 3)))]
        events: tuple[Interval, Interval] = (
            ("checkpoint", float(rng.uniform(1, 6))),
            ("restart", float(rng.uniform(10, 60))),
        )
        dips = dips_by_phase(power_trace([*steps * 4, events[0], *steps * 4, events[1], *steps], H100_WATTS, gpus=1000))
        ordered += dips["restart"] > dips["checkpoint"] > dips["collective"] > 0
    return "power: dips restart > checkpoint > collective", f"{ordered} of 20", "", "20", mark(reached=ordered == 20)  # noqa: PLR2004


def _most(title: str, value: float, most: float, unit: str) -> Row:
    return title, f"{value:.2f} {unit}", "", f"<= {most:g} {unit}", mark(reached=value <= most)
