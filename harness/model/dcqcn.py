"""Simulate DCQCN and PFC at one bottleneck in time slots, for many settings at once. Modelled. Pure.

N senders share a queue that marks packets with ECN by RED (Kmin, Kmax, Pmax). The receiver answers marks with CNPs, at
most one per flow every `cnp_s`. On a CNP a sender cuts its rate by alpha / 2. It recovers by timer and byte counter:
five fast steps, then additive and then hyper increase (Zhu et al., Congestion Control for Large-Scale RDMA Deployments,
SIGCOMM 2015).

When the queue exceeds `xoff_bytes`, its switch pauses the port that feeds it, until the queue has fallen to `xon_bytes`
(PFC, IEEE 802.1Qbb). The pause stops every flow on that port. A victim flow to an idle port loses the same share of its
time: head-of-line blocking.

Rates of single flows oscillate: with 4 or more senders, their means over 1 ms are not within 10 % of the fair share.
Shares are therefore means over `WINDOW_S`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize

from faultbed.testbed.errors import UsageError
from faultbed.testbed.routing.max_min import Floats

__all__ = ["WINDOW_S", "Outcome", "Settings", "fixed_point_bytes", "simulate"]

WINDOW_S = 0.1
"""Length of the window over which shares are averaged (or half of the simulated time, if that is shorter)."""
MOST_FLOWS = 1024
MOST_SLOTS = 5_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A bottleneck and its senders. The defaults are those of the paper's section 5, for 40 Gb/s.

    Attributes:
        flows: number of senders.
        gbps: rate of the bottleneck and of each sender's link, in Gb/s.
        kmin_bytes, kmax_bytes: queue below which no packet is marked, and above which every packet is.
        pmax: probability of a mark just below `kmax_bytes`.
        g: weight of a CNP in the moving average alpha.
        increase_mbps: step of the additive increase, in Mb/s.
        timer_s, counter_bytes: a sender raises its rate after this time, and after sending so many bytes.
        fast_steps: number of fast recovery steps before the additive increase.
        cnp_s: minimum time between two CNPs of a flow.
        alpha_s: time without a CNP after which alpha decays.
        rtt_s: time from a mark to the sender's reaction.
        mtu_bytes: size of a packet.
        xoff_bytes, xon_bytes: queue above which PFC pauses, and at which it resumes; infinity: no PFC.
    """

    flows: int
    gbps: float = 40.0
    kmin_bytes: float = 5e3
    kmax_bytes: float = 200e3
    pmax: float = 0.01
    g: float = 1 / 256
    increase_mbps: float = 40.0
    timer_s: float = 55e-6
    counter_bytes: float = 10e6
    fast_steps: int = 5
    cnp_s: float = 50e-6
    alpha_s: float = 55e-6
    rtt_s: float = 8e-6
    mtu_bytes: float = 1000.0
    xoff_bytes: float = math.inf
    xon_bytes: float = math.inf

    @property
    def bytes_per_s(self) -> float:
        """Rate of the bottleneck."""
        return self.gbps * 1e9 / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a setting, over the last `WINDOW_S`.

    Attributes:
        least_share, most_share: mean rate of the slowest and the fastest flow, relative to the fair share.
        jain: Jain's fairness index of the mean rates, 1 / flows to 1.
        utilisation: utilisation of the bottleneck, 0 to 1.
        queue_mean_bytes, queue_p99_bytes: mean and 99th percentile of the queue's length.
        paused: share of the time in which the feeding port is paused, 0 to 1.
        pauses_per_s: number of pauses per second.
        fixed_point_bytes: queue at the fixed point of the fluid model; None: it has no fixed point.
    """

    settings: Settings
    least_share: float
    most_share: float
    jain: float
    utilisation: float
    queue_mean_bytes: float
    queue_p99_bytes: float
    paused: float
    pauses_per_s: float
    fixed_point_bytes: float | None

    @property
    def victim_share(self) -> float:
        """Remaining share of the rate of a flow that enters by the paused port and leaves by an idle one, 0 to 1."""
        return 1 - self.paused


def check(settings: Settings) -> None:
    """Reject invalid settings.

    Raises:
        UsageError: a value is invalid; the message names it.
    """
    for field in dataclasses.fields(Settings):
        value = getattr(settings, field.name)
        is_pause = field.name in ("xoff_bytes", "xon_bytes")
        if not value > 0 or (math.isinf(value) and not is_pause):  # NaN is refused, too
            raise UsageError(f"congestion: {field.name} must be above 0, not {value:g}")
    if settings.flows > MOST_FLOWS:
        raise UsageError(f"congestion: {settings.flows} flows, of at most {MOST_FLOWS}")
    if settings.kmin_bytes >= settings.kmax_bytes or settings.pmax > 1:
        raise UsageError(
            f"congestion: kmin {settings.kmin_bytes:g} must be below kmax {settings.kmax_bytes:g}, and pmax "
            f"{settings.pmax:g} at most 1"
        )
    if settings.xon_bytes > settings.xoff_bytes:
        raise UsageError(f"congestion: xon {settings.xon_bytes:g} must not be above xoff {settings.xoff_bytes:g}")


def fixed_point_bytes(settings: Settings) -> float | None:
    """Return the queue at the fixed point of the fluid model (the paper's equations 5 to 9); None: there is none."""
    packets = settings.bytes_per_s / settings.mtu_bytes
    rate = packets / settings.flows
    counter, additive = (
        settings.counter_bytes / settings.mtu_bytes,
        settings.increase_mbps * 1e6 / 8 / settings.mtu_bytes,
    )

    def surplus(mark: float) -> float:
        log_kept = np.log1p(-mark)
        alpha = -np.expm1(settings.alpha_s * rate * log_kept)
        cut = -np.expm1(settings.cnp_s * rate * log_kept)
        by_counter = rate * mark / np.expm1(-counter * log_kept)
        by_timer = rate * mark / np.expm1(-settings.timer_s * rate * log_kept)
        fast = settings.fast_steps
        late = by_counter * np.exp(fast * counter * log_kept) + by_timer * np.exp(
            fast * settings.timer_s * rate * log_kept
        )
        gap = settings.cnp_s * additive * late / cut
        return float(gap / 2 * (by_counter + by_timer) - rate * alpha / (2 * settings.cnp_s) * cut)

    try:
        with np.errstate(over="ignore"):
            mark = float(optimize.brentq(surplus, 1e-9, 0.5))
    except ValueError:  # both ends have one sign
        return None
    if mark > settings.pmax:  # beyond Kmax every packet is marked: the fluid model does not hold there
        return None
    return settings.kmin_bytes + mark / settings.pmax * (settings.kmax_bytes - settings.kmin_bytes)


@dataclass(slots=True, kw_only=True)
class _Senders:
    """State of all senders, arrays of shape (settings, flows)."""

    rate: Floats
    target: Floats
    alpha: Floats
    alpha_at: Floats
    timer_at: Floats
    sent: Floats
    timers: Floats
    counters: Floats
    last_cnp: Floats


def simulate(
    settings: Sequence[Settings], *, duration_s: float = 0.2, slot_s: float = 1e-6, seed: int = 1
) -> tuple[Outcome, ...]:
    """Simulate all settings together and return the outcome of each. Flows begin 2 ms after each other.

    Raises:
        UsageError: settings that are invalid, or too many slots.
    """
    for setting in settings:
        check(setting)
    if not 0 < duration_s / slot_s <= MOST_SLOTS:
        raise UsageError(f"congestion: {duration_s:g} s are not 1 to {MOST_SLOTS} slots of {slot_s:g} s")
    rng = np.random.default_rng(seed)
    flows = max(setting.flows for setting in settings)
    parameters = _parameters(settings)
    delay = np.maximum(1, np.rint(parameters.rtt_s[:, 0] / slot_s).astype(int))
    shape = (len(settings), flows)
    exists = np.arange(flows) < np.array([[setting.flows] for setting in settings])
    start = np.where(exists, np.arange(flows) * min(2e-3, duration_s / 4 / flows), math.inf)
    state = _Senders(
        rate=np.broadcast_to(parameters.capacity, shape).copy(),
        target=np.broadcast_to(parameters.capacity, shape).copy(),
        alpha=np.ones(shape),
        alpha_at=np.zeros(shape),
        timer_at=np.zeros(shape),
        sent=np.zeros(shape),
        timers=np.zeros(shape),
        counters=np.zeros(shape),
        last_cnp=np.full(shape, -1.0),
    )
    slots = round(duration_s / slot_s)
    measured_from = slots - round(min(WINDOW_S, duration_s / 2) / slot_s)
    marks = np.zeros((int(delay.max()) + 1, *shape), dtype=bool)
    pauses = np.zeros((int(delay.max()) + 1, len(settings)), dtype=bool)
    rows = np.arange(len(settings))
    queue = np.zeros(len(settings))
    paused = np.zeros(len(settings), dtype=bool)
    totals = {name: np.zeros(shape if name == "rate" else len(settings)) for name in ("rate", "paused", "begun", "out")}
    queues = []
    for slot in range(slots):
        now = slot * slot_s
        # CNPs and pauses take effect after `rtt_s`: `marks` and `pauses` are rings of the last slots.
        arrived = (slot - delay) % len(marks)
        is_stopped = pauses[arrived, rows]
        on = (start <= now) & ~is_stopped[:, None]
        sent = np.where(on, state.rate, 0.0) * slot_s
        fill = queue[:, None]
        mark = np.clip((fill - parameters.kmin) / (parameters.kmax - parameters.kmin), 0.0, 1.0) * parameters.pmax
        mark = np.where(fill > parameters.kmax, 1.0, mark)
        arriving = sent.sum(axis=1)
        leaving = np.minimum(queue + arriving, parameters.capacity[:, 0] * slot_s)
        queue = queue + arriving - leaving
        was_paused = paused
        paused = np.where(paused, queue > parameters.xon[:, 0], queue > parameters.xoff[:, 0])
        pauses[slot % len(pauses)] = paused
        marked = rng.random(shape) < 1 - (1 - mark) ** (sent / parameters.mtu)
        has_cnp = marked & (now - state.last_cnp >= parameters.cnp_s)
        state.last_cnp[has_cnp] = now
        marks[slot % len(marks)] = has_cnp
        _react(state, marks[arrived, rows], now, parameters.g)
        _recover(state, sent, on, now, parameters)
        if slot >= measured_from:
            totals["rate"] += sent
            totals["paused"] += paused
            totals["begun"] += paused & ~was_paused
            totals["out"] += leaving
            if slot % 10 == 0:
                queues.append(queue)
    measured_s = (slots - measured_from) * slot_s
    sampled = np.array(queues)
    return tuple(
        _outcome(setting, totals, sampled[:, index], index, measured_s, slot_s)
        for index, setting in enumerate(settings)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameters:
    """Parameters of all settings, arrays of shape (settings, 1); rates in bytes per second."""

    capacity: Floats
    kmin: Floats
    kmax: Floats
    pmax: Floats
    g: Floats
    additive: Floats
    timer_s: Floats
    counter: Floats
    fast: Floats
    cnp_s: Floats
    alpha_s: Floats
    rtt_s: Floats
    mtu: Floats
    xoff: Floats
    xon: Floats


def _parameters(settings: Sequence[Settings]) -> _Parameters:
    def column(name: str) -> Floats:
        return np.array([[float(getattr(setting, name))] for setting in settings])

    return _Parameters(
        capacity=column("bytes_per_s"),
        kmin=column("kmin_bytes"),
        kmax=column("kmax_bytes"),
        pmax=column("pmax"),
        g=column("g"),
        additive=column("increase_mbps") * 1e6 / 8,
        timer_s=column("timer_s"),
        counter=column("counter_bytes"),
        fast=column("fast_steps"),
        cnp_s=column("cnp_s"),
        alpha_s=column("alpha_s"),
        rtt_s=column("rtt_s"),
        mtu=column("mtu_bytes"),
        xoff=column("xoff_bytes"),
        xon=column("xon_bytes"),
    )


def _react(state: _Senders, cut: np.ndarray, now: float, g: Floats) -> None:
    """Cut the rates of the senders that got a CNP."""
    if not cut.any():
        return
    weight = np.broadcast_to(g, cut.shape)[cut]
    state.target[cut] = state.rate[cut]
    state.rate[cut] *= 1 - state.alpha[cut] / 2
    state.alpha[cut] = (1 - weight) * state.alpha[cut] + weight
    for times in (state.alpha_at, state.timer_at):
        times[cut] = now
    for counts in (state.sent, state.timers, state.counters):
        counts[cut] = 0


def _recover(state: _Senders, sent: Floats, on: np.ndarray, now: float, parameters: _Parameters) -> None:
    """Decay alpha, and raise the rates of the senders whose timer or byte counter expired."""
    decays = now - state.alpha_at >= parameters.alpha_s
    state.alpha = np.where(decays, state.alpha * (1 - parameters.g), state.alpha)
    state.alpha_at[decays] = now
    state.sent += sent
    by_timer = (now - state.timer_at >= parameters.timer_s) & on
    by_counter = state.sent >= parameters.counter
    raised = by_timer | by_counter
    if not raised.any():
        return
    state.timer_at[by_timer] = now
    state.timers += by_timer
    state.sent = np.where(by_counter, state.sent - parameters.counter, state.sent)
    state.counters += by_counter
    hyper = raised & (np.minimum(state.timers, state.counters) > parameters.fast)
    added = raised & ~hyper & (np.maximum(state.timers, state.counters) > parameters.fast)
    state.target += parameters.additive * added + 10 * parameters.additive * hyper
    np.minimum(state.target, parameters.capacity, out=state.target)
    state.rate = np.where(raised, (state.rate + state.target) / 2, state.rate)


def _outcome(
    setting: Settings, totals: dict[str, Floats], queue: Floats, index: int, measured_s: float, slot_s: float
) -> Outcome:
    rates = totals["rate"][index, : setting.flows] / measured_s
    fair = setting.bytes_per_s / setting.flows
    return Outcome(
        settings=setting,
        least_share=float(rates.min()) / fair,
        most_share=float(rates.max()) / fair,
        jain=float(rates.sum() ** 2 / len(rates) / max(float((rates**2).sum()), 1e-300)),
        utilisation=float(totals["out"][index]) / measured_s / setting.bytes_per_s,
        queue_mean_bytes=float(queue.mean()),
        queue_p99_bytes=float(np.percentile(queue, 99)),
        paused=float(totals["paused"][index]) * slot_s / measured_s,
        pauses_per_s=float(totals["begun"][index]) / measured_s,
        fixed_point_bytes=fixed_point_bytes(setting),
    )
