"""The section `[bystander]` of an experiment: a flow beside the workload that no fault should affect.

Its goodput under each fault, compared with its goodput before the first one, shows whether faults stay within their
blast radius (`faultbed.harness.analysis.isolation`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from faultbed.harness.quantities import parse_size_bytes
from faultbed.harness.strict import Section, fail, one_of, positive
from faultbed.testbed.errors import UsageError
from faultbed.traffic.engine.task_specs import QpParams
from faultbed.traffic.flows.flow_run import ATOMIC_BYTES, VERBS, FlowSpec, check

__all__ = ["KEYS", "BystanderFile", "bystander_of"]

_LONGEST_S = 24 * 3600.0
"""Longer than any run. A run stops its bystander at its end."""


class BystanderFile(Section, frozen=True, kw_only=True):
    """The section as written. `rate` is payload in Mb/s, 0 for an unpaced flow; `depth` 0 chooses it by size."""

    src: str
    dst: str
    flow: str = "write"
    size: str = "64KiB"
    qps: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    depth: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 4
    rate: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    qp: dict[str, int] = msgspec.field(default_factory=dict)


KEYS = BystanderFile.__struct_fields__


def bystander_of(section: BystanderFile | None, source: str) -> FlowSpec | None:
    """Read the section; None: there is none. `src` and `dst` may still be selectors.

    Raises:
        ConfigError: a value is invalid; the message begins with its path in the file.
    """
    if section is None:
        return None
    one_of(section.flow, VERBS, source, "bystander.flow")
    try:
        spec = FlowSpec(
            src=section.src,
            dst=section.dst,
            verb=section.flow,
            message_bytes=ATOMIC_BYTES
            if section.flow == "atomic"
            else positive(parse_size_bytes, section.size, source, "bystander.size"),
            qps=section.qps,
            depth=section.depth,
            rate_bps=section.rate * 1e6,
            duration_s=_LONGEST_S,
            qp=QpParams.of(section.qp),
        )
        check(spec)
    except UsageError as error:
        raise fail(source, "bystander", str(error)) from error
    return spec
