"""Counters in the text format of Prometheus (prometheus.io, "Exposition formats"), for those who run Grafana. Pure.

faultbed_out_of_seq_request{lab="soft",node="host1",device="rxe0"} 7
"""

from __future__ import annotations

import re

from testbed.counters import STATES, Snapshot

__all__ = ["exposition"]

_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_]")


def exposition(lab: str, counters: Snapshot) -> str:
    """Every counter and state as a metric of its own, with what it is of as labels."""
    families: dict[str, list[str]] = {}
    for node, values in counters.items():
        for name, value in values.items():
            device, _, what = name.rpartition(".")
            labels = ",".join(
                f'{key}="{_escaped(text)}"' for key, text in (("lab", lab), ("node", node), ("device", device))
            )
            families.setdefault(what, []).append(f"{_metric(what)}{{{labels}}} {value}")
    lines = []
    for what, samples in sorted(families.items()):
        lines.append(f"# TYPE {_metric(what)} {'gauge' if what in STATES else 'counter'}")
        lines += sorted(samples)
    return "\n".join(lines) + "\n"


def _metric(what: str) -> str:
    return f"faultbed_{_NOT_A_NAME.sub('_', what)}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
