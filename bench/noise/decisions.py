"""How often the product's decisions on a generator of noise are wrong, and how often they decide.

A generator is a Python file that defines

    METRIC = "jct_ratio"        the metric whose bound is decided
    TRUE = 1.2                  its true value
    values(rng, n)              the series of one run: n values in the order of time
    runs(rng, k, n)             k such series, in the order of the runs
    pairs(rng, k, n)            k times (seconds per iteration of the run, the same of its fault-free twin, first and
                                last iteration of the fault), in the order of the runs

and at least one of the last three functions, those that make sense for the metric. `rng` is a `numpy.random.Generator`.

A bound at TRUE should not be decided: `wrong_fail` and `wrong_pass` are the shares of trials in which it is. `decided`
is the share of FAIL if TRUE is 2, 5, 10 or 20 % beyond the bound.
"""

from __future__ import annotations

import inspect
import math
import runpy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from faultbed.harness import confidence
from faultbed.harness.analysis import intervals
from faultbed.harness.analysis.ettr import Ettr
from faultbed.harness.analysis.observations import Observation
from faultbed.harness.bounds import Bound, bounds_of, check_bound
from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.experiment.metrics import Metric, lookup
from faultbed.harness.ledger.statistics.contrasts import Member
from faultbed.harness.ledger.statistics.decision import TAIL, Look, Tolerance
from faultbed.harness.report.comparison.compare import HIGHER_IS_BETTER
from faultbed.harness.run.repeats.pooled import check_several, planned_looks
from faultbed.harness.verdict import Check, Verdict
from faultbed.testbed.errors import UsageError
from faultbed.testbed.routing.offered_load import max_over_mean

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

__all__ = ["BEYOND", "COUNTS", "FAR", "LENGTHS", "Generator", "NoiseRow", "load", "measure"]

BEYOND = (2, 5, 10, 20)
"""Percentages by which the true value is beyond the bound, one for each column of `decided`."""
FAR = 1.75
"""Factor beyond bound and level tolerance at which one run has to decide."""
LENGTHS = (10, 50, 200)
COUNTS = (8, 9, 12, 20)
"""Numbers of runs, or of pairs, in a pool."""

_UPWARD = ("bisection", "jfi", "link_utilisation.")
"""Prefixes of metrics of which more is better, beside those of a comparison."""
_WINDOW = 10
"""Bins of a rolling window of goodput."""

Pair = tuple["Floats", "Floats", int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """Noise with a known truth. `values`, `runs` and `pairs` are as in the file; None: it does not define it."""

    metric: Metric
    truth: float
    values: Callable[..., Any] | None = None
    runs: Callable[..., Any] | None = None
    pairs: Callable[..., Any] | None = None
    source: str = "noise"

    @property
    def is_upward(self) -> bool:
        """Whether more is better, so that the bound is a minimum."""
        return self.metric.name in HIGHER_IS_BETTER or self.metric.name.startswith(_UPWARD)

    def bound(self, beyond: float = 0.0) -> Bound:
        """Return a bound that the truth is beyond by this share."""
        if self.is_upward:
            expectation = Expectation(metric=self.metric, minimum=self.truth * (1 + beyond), of=self._of)
        else:
            expectation = Expectation(metric=self.metric, maximum=self.truth / (1 + beyond), of=self._of)
        return bounds_of(expectation)[0]

    @property
    def _of(self) -> Any:
        """Return what a bound is about: the setting wherever that makes sense, because the truth is not one run's."""
        return "setting" if self.metric.either else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseRow:
    """Shares of `trials` trials with `n` values in each of `k` runs; `of` is the function that made them.

    `decided` has, by the percentage that the truth is beyond the bound, the share of FAIL; `decided_far` that of a
    truth `FAR` times the level tolerance beyond it.
    """

    of: str
    metric: str
    n: int
    k: int
    trials: int
    wrong_fail: float
    wrong_pass: float
    inconclusive: float
    decided: dict[str, float]
    decided_far: float

    @property
    def is_right(self) -> bool:
        """Whether at most 1 % of the decisions are wrong on each side, within two standard errors."""
        return max(self.wrong_fail, self.wrong_pass) <= 0.01 + 2 * math.sqrt(0.01 * 0.99 / self.trials)


def load(path: Path) -> Generator:
    """Read a generator.

    Raises:
        UsageError: the file cannot be run, or does not define what a generator needs.
    """
    try:
        names = runpy.run_path(str(path))
    except Exception as error:
        raise UsageError(f"{path}: cannot be run: {type(error).__name__}: {error}; correct the file") from error
    name, truth = names.get("METRIC"), names.get("TRUE")
    metric = lookup(name, ()) if isinstance(name, str) else None
    if metric is None or metric.unit == "host":
        raise UsageError(f"{path}: METRIC is {name!r}, which is no metric with a number; set it to one, like jct_ratio")
    if isinstance(truth, bool) or not isinstance(truth, int | float) or not (math.isfinite(truth) and truth > 0):
        raise UsageError(f"{path}: TRUE is {truth!r}; set it to the true value of {name}, a number above 0")
    functions = {key: names[key] for key in ("values", "runs", "pairs") if key in names}
    for key, function in functions.items():
        if not callable(function) or len(inspect.signature(function).parameters) != (2 if key == "values" else 3):
            expected = "values(rng, n)" if key == "values" else f"{key}(rng, k, n)"
            raise UsageError(f"{path}: {key}: define it as {expected}")
    if not functions:
        raise UsageError(f"{path}: defines no values, runs or pairs; define at least one of them")
    return Generator(metric=metric, truth=float(truth), source=str(path), **functions)


def measure(
    noise: Generator,
    *,
    lengths: Sequence[int],
    counts: Sequence[int],
    trials: int,
    tolerance: Tolerance,
    is_sequential: bool = False,
    seed: int = 1,
) -> Iterator[NoiseRow]:
    """Yield one row for each function of a generator, each length, and each number of runs.

    `is_sequential`: pools are decided as by `run --until-decided`, at looks up to their number of runs.

    Raises:
        UsageError: a function raises, or returns something else than it should.
    """
    for n in lengths:
        if noise.values is not None:
            yield _row(noise, "values", n, 1, trials, tolerance, planned=None, seed=seed)
        for of in ("runs", "pairs"):
            if getattr(noise, of) is not None:
                for k in (1, *counts) if of == "pairs" or noise.values is None else counts:
                    planned = planned_looks(noise.bound(), k if is_sequential and k > 1 else None, TAIL)
                    yield _row(noise, of, n, k, trials, tolerance, planned=planned, seed=seed)


def _row(
    noise: Generator,
    of: str,
    n: int,
    k: int,
    trials: int,
    tolerance: Tolerance,
    *,
    planned: Sequence[Look] | None,
    seed: int,
) -> NoiseRow:
    level = 1 - 2 * TAIL
    shares = (0.0, *(percent / 100 for percent in BEYOND), FAR * tolerance.factor - 1)
    bounds = [noise.bound(share) for share in shares]
    verdicts: list[list[Verdict]] = [[] for _ in bounds]
    for trial in range(trials):
        rng = np.random.default_rng((seed, n, k, trial))
        observations = _drawn(noise, of, rng, k, n, level)
        for bound, collected in zip(bounds, verdicts, strict=True):
            alone = [
                check_bound(bound, observation, (), tolerance=tolerance, tail=TAIL) for observation in observations
            ]
            collected.append(_together(bound, observations, alone, planned).verdict)
    at_truth, *beyond, far = [
        {verdict: collected.count(verdict) / trials for verdict in Verdict} for collected in verdicts
    ]
    return NoiseRow(
        of=of,
        metric=noise.metric.name,
        n=n,
        k=k,
        trials=trials,
        wrong_fail=at_truth[Verdict.FAIL],
        wrong_pass=at_truth[Verdict.PASS],
        inconclusive=at_truth[Verdict.INCONCLUSIVE],
        decided={str(percent): share[Verdict.FAIL] for percent, share in zip(BEYOND, beyond, strict=True)},
        decided_far=far[Verdict.FAIL],
    )


def _together(
    bound: Bound, observations: Sequence[Observation], alone: Sequence[Check], planned: Sequence[Look] | None
) -> Check:
    """Return the check of one run, or of all of them."""
    if len(alone) == 1:
        return alone[0]
    values = [
        float(observation.value) if isinstance(observation.value, int | float) else None for observation in observations
    ]
    if planned is None:
        return check_several(bound, values, alone, tail=TAIL)
    check = alone[0]
    for runs in range(1, len(alone) + 1):
        check = check_several(bound, values[:runs], alone[:runs], tail=TAIL, planned=planned)
        if check.verdict.is_conclusive:
            break
    return check


def _drawn(noise: Generator, of: str, rng: np.random.Generator, k: int, n: int, level: float) -> list[Observation]:
    """Return what is observed in each of k runs.

    Raises:
        UsageError: the generator raises, or returns something else than it should.
    """
    function = getattr(noise, of)
    try:
        drawn = [function(rng, n)] if of == "values" else [*function(rng, k, n)]
        if len(drawn) != k:
            raise ValueError(f"{len(drawn)} runs instead of {k}")  # noqa: TRY301 - reported as any other error of the file
        if of == "pairs":
            pairs = [(_series(run), _series(twin), int(first), int(last)) for run, twin, first, last in drawn]
            return [_observe_pair(noise.metric, pair, level) for pair in pairs]
        return [_observe_series(noise.metric, _series(series), level) for series in drawn]
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{noise.source}: {of}: {type(error).__name__}: {error}; correct the file") from error


def _series(values: Any) -> Floats:
    series = np.asarray(values, dtype=np.float64)
    if series.ndim != 1 or not len(series):
        raise ValueError(f"a series of shape {series.shape} instead of (n,)")
    return series


def _observe_series(metric: Metric, series: Floats, level: float) -> Observation:
    """Return what a run with these values observes."""
    kind, _, percent = metric.name.rpartition(".p")
    if not np.isfinite(series).all():
        return Observation(value=None, detail="a value that is no number")
    if metric.name.startswith("mmr."):
        return Observation(value=max_over_mean([round(value) for value in series]), detail="")
    if metric.name == "jfi":
        return Observation(value=float(series.sum() ** 2 / (len(series) * (series @ series))), detail="")
    if kind and percent.isdigit():
        worth = confidence.independent_of(series, is_rough=True)
        interval = (
            None
            if worth is None
            else confidence.percentile_bounds(series, int(percent), independent=int(worth), least=0.0, level=level)
        )
        return Observation(value=float(np.percentile(series, int(percent))), detail="", sampling=interval)
    if metric.name == "slo_attainment":
        worth = confidence.independent_of(series, is_rough=True)
        kept = int((series > 0).sum())
        share = None if worth is None else confidence.share_interval(kept, len(series), level=level, independent=worth)
        return Observation(value=kept / len(series), detail="", sampling=share)
    if metric.estimand == "contrast":
        raise UsageError(f"{metric.name} compares a fault with the time before and after it; define pairs(rng, k, n)")
    interval = confidence.mean_interval(series, level=level, is_rough=True)
    return Observation(value=float(series.mean()), detail="", sampling=interval)


def _observe_pair(metric: Metric, pair: Pair, level: float) -> Observation:
    """Return what a run and its twin observe. All metrics but `jct_ratio` are of the run alone."""
    run, twin, first, last = pair
    if not (np.isfinite(run).all() and np.isfinite(twin).all() and run.min() > 0 and twin.min() > 0):
        return Observation(value=None, detail="an iteration without a time")
    if not 0 <= first <= last < len(run):
        raise ValueError(f"a fault in the iterations {first} to {last} of {len(run)}")
    if metric.name == "ettr":
        whole_ns = 1e9 * run
        of_run = Ettr(
            iterations=len(run),
            healthy_ns=float(whole_ns[:first].mean()) if first else float("nan"),
            wall_ns=round(float(whole_ns.sum())),
            lost_ns=0.0,
            storage_ns=0.0,
            predicted=None,
            alone_ns=tuple(whole_ns[:first].tolist()),
            settled_ns=tuple(whole_ns[last + 1 :].tolist()),
        )
        return Observation(value=of_run.ratio if first else None, detail="", interval=of_run.interval(level))
    if metric.estimand == "contrast":
        return _observe_contrast(metric, run, first, last, level)
    if metric.name != "jct_ratio":
        return _observe_series(metric, run, level)
    count = min(len(run), len(twin))
    quiet = np.ones(count, dtype=np.bool_)
    quiet[first : last + 1] = False
    interval = confidence.total_ratio(run[:count], twin[:count], quiet=quiet, before=0, level=level, is_rough=True)
    return Observation(value=float(run[:count].sum() / twin[:count].sum()), detail="", sampling=interval)


def _observe_contrast(metric: Metric, run: Floats, first: int, last: int, level: float) -> Observation:
    """Return the goodput under a fault over that before and after it, on bins as long as a usual iteration."""
    step = float(np.median(run))
    ends = np.concatenate([[0.0], np.cumsum(run)])
    edges = np.arange(0.0, ends[-1], step)
    rates = np.diff(np.interp(edges, ends, np.arange(len(ends), dtype=np.float64)))
    begin, end = round(ends[first] / step), max(round(ends[last + 1] / step), round(ends[first] / step) + 1)
    before, under, after = rates[:begin], rates[begin:end], rates[end:]
    if not len(before) or not len(under) or before.mean() <= 0:
        return Observation(value=None, detail="no time before the fault, or under it")
    if metric.name in ("goodput_min_ratio", "dip"):
        width = min(_WINDOW, len(under))
        windows = np.convolve(under, np.full(width, 1 / width), mode="valid")
        value = float(windows.min() / before.mean())
        ranges = [
            confidence.lowest_window(
                float(windows.min() / control.mean()), control, width=width, windows=len(windows), level=level
            )
            if len(control) and control.mean() > 0
            else None
            for control in (before, after)
        ]
    else:
        value = float(under.mean() / before.mean())
        ranges = [intervals.ratio_to(under, control, level) for control in (before, after)]
    member = Member(name="fault", value=value, before=intervals.ends_of(ranges[0]), after=intervals.ends_of(ranges[1]))
    return Observation(value=1 - value if metric.is_share_lost else value, detail="", members=(member,))
