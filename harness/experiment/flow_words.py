"""Settings of a flow as users write them, on the command line and in an experiment file.

`rate` is the payload rate of a flow in Mb/s, `on` and `off` are the lengths of a burst and of the pause after it.
`late_receives` is by how much each receive is posted late. `probe` adds a flow of small timed writes beside each flow.
An atomic always has 8 bytes: its `size` is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from faultbed.harness.experiment.job_words import Reader
from faultbed.harness.quantities import parse_duration_ns, parse_size_bytes
from faultbed.traffic.engine.task_specs import QpParams
from faultbed.traffic.flows.flow_run import ATOMIC_BYTES, FlowSpec

__all__ = ["FlowWords", "between"]

PROBE_BYTES = 64
PROBES_PER_S = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowWords:
    """Settings of a flow as text and numbers, which `flow` converts."""

    verb: str
    transport: str
    size: str
    qps: int
    spread: str
    depth: int
    entropy: int
    admit: int
    rate: float
    on: str | None
    off: str | None
    latency: bool
    duration: str
    qp: QpParams
    memory: str = "host"
    late_receives: str | None = None
    check: bool = False

    def flow(self, read: Reader) -> FlowSpec:
        """Return a flow without endpoints. `read` converts a value, and names its place if it is invalid."""

        def seconds(text: str | None, name: str) -> float:
            return read(parse_duration_ns, text, name) / 1e9 if text else 0.0

        return FlowSpec(
            src="",
            dst="",
            message_bytes=ATOMIC_BYTES if self.verb == "atomic" else read(parse_size_bytes, self.size, "size"),
            rate_bps=self.rate * 1e6,
            on_s=seconds(self.on, "on"),
            off_s=seconds(self.off, "off"),
            late_receives_ms=seconds(self.late_receives, "late_receives") * 1e3,
            duration_s=seconds(self.duration, "duration"),
            **{name: getattr(self, name) for name in FlowSpec.__slots__ if hasattr(self, name)},
        )


def between(flow: FlowSpec, src: str, dst: str, *, probe: bool) -> list[FlowSpec]:
    """Return the flow between two RNICs, followed by its probe if `probe`."""
    main = replace(flow, src=src, dst=dst)
    beside = FlowSpec(
        src=src,
        dst=dst,
        message_bytes=PROBE_BYTES,
        depth=1,
        chain=1,
        latency=True,
        rate_bps=PROBES_PER_S * PROBE_BYTES * 8,
        duration_s=flow.duration_s,
        qp=flow.qp,
    )
    return [main, beside] if probe else [main]
