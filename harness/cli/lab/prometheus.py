"""Counters in the text format of Prometheus (prometheus.io, "Exposition formats", 0.0.4), for Grafana and others. Pure.

    # HELP faultbed_out_of_seq_request Counter out_of_seq_request of a node's kernel, driver or RNIC.
    # TYPE faultbed_out_of_seq_request counter
    faultbed_out_of_seq_request{lab="soft",node="host1",device="rxe0"} 7

The text is printed, for the node exporter's textfile collector: nothing listens. A counter keeps the name that its
kernel or driver gives it, without the suffix `_total`, which only OpenMetrics requires. Labels are names of the
inventory and of devices, never a process or a time, so that a series stays one series. If a name has characters that
Prometheus does not allow, they become `_`, and the label `counter` has the original name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from faultbed.testbed.observe.counters import STATES, Snapshot

__all__ = ["exposition"]

_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_]")


def exposition(lab: str, counters: Snapshot, *, increments: bool = False) -> str:
    """Return counters and states as text: one metric for each name, with lab, node and device as labels.

    With `increments`, each value is by how much the counter grew within some time, so it is a gauge. Without counters
    the text is empty.
    """
    families: dict[str, list[tuple[str, int, str]]] = {}
    for name, labels, value in _samples(lab, counters):
        families.setdefault(_metric(name), []).append((labels, value, name))
    lines = []
    for metric, samples in sorted(families.items()):
        name = min(name for *_, name in samples)
        is_state = name in STATES
        kind = "State" if is_state else "Increment of counter" if increments else "Counter"
        lines.append(f"# HELP {metric} {kind} {_help_text(name)} of a node's kernel, driver or RNIC.")
        lines.append(f"# TYPE {metric} {'gauge' if is_state or increments else 'counter'}")
        lines += [f"{metric}{{{labels}}} {value}" for labels, value, _ in sorted(samples)]
    return "".join(f"{line}\n" for line in lines)


def _samples(lab: str, counters: Snapshot) -> Iterator[tuple[str, str, int]]:
    """Yield (metric name without the device, labels, value) of each counter."""
    for node, values in counters.items():
        for name, value in values.items():
            device, _, counter = name.rpartition(".")
            labels = [("lab", lab), ("node", node), ("device", device)]
            if _NOT_A_NAME.search(counter):
                labels.append(("counter", counter))
            yield counter, ",".join(f'{key}="{_escaped(text)}"' for key, text in labels), value


def _metric(name: str) -> str:
    return f"faultbed_{_NOT_A_NAME.sub('_', name)}"


def _help_text(text: str) -> str:
    """Escape a text for a HELP line."""
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _escaped(text: str) -> str:
    """Escape a text for a label's value."""
    return _help_text(text).replace('"', r"\"")
