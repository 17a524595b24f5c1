"""The time of a training step of a large language model on a preset fabric. Modelled. Pure.

Tensor parallel groups (TP) exchange data within a host, pipeline stages (PP) send activations to the next stage, and
data parallel groups (DP) reduce gradients and gather parameters. A step of M micro-batches over P stages with V chunks
each takes

    micro-batch x (M + (P - 1) / V)        (1F1B, interleaved for V > 1: Narayanan et al., SC 2021, section 2.2.2)

plus the communication that does not overlap with compute. How much overlaps depends on the framework, so the result is
a lower bound (all of it overlaps) and an upper bound (none does).

A DP ring is one unit of `faultbed.testbed.routing.max_min`, because its ranks wait for each other. Each pair of GPUs in
neighbouring stages is a unit of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from faultbed.harness.model.preset_fabric import Hops, Numbers, PresetFabric
from faultbed.testbed.errors import UsageError
from faultbed.testbed.routing.max_min import Floats, Loads, link_rates, max_min_rates, merged

__all__ = [
    "LLAMA3_405B",
    "PUBLISHED",
    "PUBLISHED_TFLOPS",
    "Layout",
    "Placement",
    "StepTime",
    "TrainedModel",
    "calibrated_micro_batch_s",
    "placed",
    "step_time",
]

Placement = Literal["ordered", "random"]
NVLINK_BYTES_PER_S = 450e9
"""NVLink bandwidth of an H100 in one direction, from its data sheet."""
ALPHA_S = 12e-6
"""Latency of a step of a ring between hosts (`faultbed.traffic.schedules.cost`)."""
_GRADIENT_BYTES, _PARAMETER_BYTES, _ACTIVATION_BYTES = 4, 2, 2
"""FP32 gradients, BF16 parameters and activations (The Llama 3 Herd of Models, section 3.3.2)."""
_TP_EXCHANGES = 4
"""Number of all-reduces per layer and micro-batch: two forward, two backward (Shoeybi et al. 2019)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A transformer: number of parameters and layers, width of the hidden state, tokens in a sequence."""

    parameters: float
    layers: int
    hidden: int
    sequence: int


LLAMA3_405B = TrainedModel(parameters=405e9, layers=126, hidden=16384, sequence=8192)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The division of a job: sizes of TP, PP and DP groups, number of micro-batches in a step, chunks of a stage.

    Ranks are ordered [TP, PP, DP], TP fastest.
    """

    tp: int = 8
    pp: int = 16
    dp: int
    micro_batches: int
    chunks: int = 8

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.tp * self.pp * self.dp

    @property
    def bubble(self) -> float:
        """Idle time of the pipeline (bubble), in units of a micro-batch's time."""
        return (self.pp - 1) / self.chunks


PUBLISHED = Layout(dp=64, micro_batches=32)
PUBLISHED_TFLOPS = 430.0
"""The published job on 8,192 GPUs, and the BF16 TFLOP/s of each GPU (The Llama 3 Herd of Models, table 4)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTime:
    """A predicted step. Times are in s.

    Attributes:
        micro_batch_s: compute time of one micro-batch in one stage, forward and backward, TP exchanges included.
        compute_s: compute time of all micro-batches, the bubble included.
        tp_s: time of the TP exchanges of all micro-batches; included in `compute_s` if that was calibrated.
        pp_s: time to send activations and gradients between stages, if nothing overlaps.
        dp_s: time of the reduce-scatter of gradients and the all-gather of parameters, if nothing overlaps.
        dp_bytes_per_s: rate of each DP ring.
        worst_link_share: utilisation of the busiest direction above the racks during DP, 0 to 1.
        flops: FLOPs of the model in a step.
        gpus: number of GPUs.
    """

    micro_batch_s: float
    compute_s: float
    tp_s: float
    pp_s: float
    dp_s: float
    dp_bytes_per_s: Floats
    worst_link_share: float
    flops: float
    gpus: int

    @property
    def least_s(self) -> float:
        """Time of the step if all communication overlaps with compute."""
        return max(self.compute_s, self.pp_s, self.dp_s)

    @property
    def most_s(self) -> float:
        """Time of the step if no communication overlaps with compute."""
        return self.compute_s + self.pp_s + self.dp_s

    def tflops(self, seconds: float) -> float:
        """Return the TFLOP/s of each GPU if the step takes `seconds`."""
        return self.flops / seconds / self.gpus / 1e12


def placed(layout: Layout, fabric: PresetFabric, placement: Placement, rng: np.random.Generator) -> Numbers:
    """Return the GPU of each rank, shape (gpus,). Hosts have `tp` GPUs; a random placement keeps them together.

    Raises:
        UsageError: the job has more GPUs than the fabric, or a rack holds no whole number of hosts.
    """
    if layout.gpus > fabric.gpus:
        raise UsageError(f"{layout.gpus} GPUs (TP x PP x DP), but {fabric.name} has {fabric.gpus}; use a smaller DP")
    if fabric.gpus_per_rack % layout.tp:
        raise UsageError(f"TP {layout.tp}: a rack of {fabric.gpus_per_rack} GPUs holds no whole number of such hosts")
    hosts = np.arange(fabric.gpus // layout.tp)
    if placement == "random":
        hosts = rng.permutation(hosts)
    first = hosts[: layout.pp * layout.dp] * layout.tp
    return (first[:, None] + np.arange(layout.tp)).ravel()


def step_time(
    model: TrainedModel,
    layout: Layout,
    fabric: PresetFabric,
    *,
    micro_batch_s: float,
    placement: Placement = "ordered",
    qps: int = 16,
    scheme: Literal["ecmp", "pinned"] = "ecmp",
    seed: int = 1,
) -> StepTime:
    """Return the time of a step.

    Args:
        model: the model that is trained.
        layout: the division of the job.
        fabric: the fabric that the job runs on.
        micro_batch_s: compute time of one micro-batch in one stage, from a measured step (`calibrated_micro_batch_s`)
            or from FLOPs.
        placement: ranks in the order of the GPUs, or on random hosts.
        qps: number of queue pairs between two GPUs.
        scheme: routing scheme; `ecmp` draws a random path for each queue pair.
        seed: seed of placement and paths.

    Raises:
        UsageError: the job does not fit the fabric, or the micro-batch's time is not a number above 0.
    """
    if not 0 < micro_batch_s < np.inf:
        raise UsageError(f"a micro-batch takes more than 0 s, not {micro_batch_s:g}")
    rng = np.random.default_rng(seed)
    gpus = placed(layout, fabric, placement, rng)
    ranks = np.arange(layout.gpus).reshape(layout.dp, layout.pp, layout.tp)
    capacity = fabric.capacity

    def hops(src: Numbers, dst: Numbers) -> Hops:
        pairs = np.repeat(src, qps), np.repeat(dst, qps)
        return fabric.pinned_hops(*pairs) if scheme == "pinned" else fabric.hashed_hops(*pairs, rng)

    # DP: the ranks with the same pipeline stage and TP rank form a ring, in which each sends to the next.
    ring = np.broadcast_to(ranks[0].ravel(), (layout.dp, layout.pp * layout.tp)).ravel()
    following = np.roll(ranks, -1, axis=0).ravel()
    loads = _unit_loads(ring, hops(gpus, gpus[following]), qps, units=layout.pp * layout.tp)
    rates = max_min_rates(loads, capacity)
    shares = link_rates(loads, rates, fabric.links) / capacity
    per_gpu = model.parameters / (layout.tp * layout.pp)
    sent = (_GRADIENT_BYTES + _PARAMETER_BYTES) * per_gpu * (layout.dp - 1) / layout.dp
    dp_s = sent / float(rates.min()) + 2 * (layout.dp - 1) * ALPHA_S if layout.dp > 1 else 0.0
    tokens_bytes = model.sequence * model.hidden * _ACTIVATION_BYTES
    layers = -(-model.layers // layout.pp)
    exchanged = tokens_bytes * 2 * (layout.tp - 1) / layout.tp * _TP_EXCHANGES * layers
    return StepTime(
        micro_batch_s=micro_batch_s,
        compute_s=micro_batch_s * (layout.micro_batches + layout.bubble),
        tp_s=exchanged / NVLINK_BYTES_PER_S * layout.micro_batches,
        pp_s=_pipeline_s(layout, hops, gpus, ranks, capacity, tokens_bytes / layout.tp, qps),
        dp_s=dp_s,
        dp_bytes_per_s=rates,
        worst_link_share=float(shares[2 * fabric.gpus :].max(initial=0.0)),
        flops=_flops(model, layout),
        gpus=layout.gpus,
    )


def _pipeline_s(
    layout: Layout,
    hops: Callable[[Numbers, Numbers], Hops],
    gpus: Numbers,
    ranks: Numbers,
    capacity: Floats,
    bytes_of_transfer: float,
    qps: int,
) -> float:
    """Return the time of all transfers between stages in s, forward and backward, if none overlaps."""
    if layout.pp == 1:
        return 0.0
    sending, receiving = gpus[ranks[:, :-1].ravel()], gpus[ranks[:, 1:].ravel()]
    loads = _unit_loads(np.arange(len(sending)), hops(sending, receiving), qps, units=len(sending))
    slowest = float(max_min_rates(loads, capacity).min())
    return 2 * layout.micro_batches * layout.chunks * (bytes_of_transfer / slowest + ALPHA_S)


def _unit_loads(unit_of_pair: Numbers, hops: Hops, qps: int, *, units: int) -> Loads:
    """Return the loads of units in which each pair of GPUs sends one byte, divided among its `qps` queue pairs."""
    is_link = hops >= 0
    unit = np.repeat(np.repeat(unit_of_pair, qps), is_link.sum(axis=1))
    return merged(unit, hops[is_link], 1 / qps, units=units)


def _flops(model: TrainedModel, layout: Layout) -> float:
    """Return the model's FLOPs in a step: 6 for each parameter and token (Kaplan et al. 2020)."""
    return 6 * model.parameters * model.sequence * layout.micro_batches * layout.dp


def calibrated_micro_batch_s(model: TrainedModel, layout: Layout, *, tflops: float, exposed_s: float = 0.0) -> float:
    """Return the compute time of a micro-batch in s from a measured step, given as TFLOP/s of each GPU.

    `exposed_s` is the communication of that step that did not overlap with compute.

    Raises:
        UsageError: the measured step is shorter than its communication, or TFLOP/s are not above 0.
    """
    if not 0 < tflops < np.inf:
        raise UsageError(f"--tflops must be above 0, not {tflops:g}")
    step_s = _flops(model, layout) / (layout.gpus * tflops * 1e12)
    if step_s <= exposed_s:
        raise UsageError(f"--tflops {tflops:g}: a step of {step_s:.3g} s is shorter than its communication; correct it")
    return (step_s - exposed_s) / (layout.micro_batches + layout.bubble)
