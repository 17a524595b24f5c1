"""Detect the loss of a host, and decide which host is lost, by silence, probes and failed connections.

The controller pings the engine of each rank every `PING_NS`. There are two limits of silence while a job runs:

- `SILENT_NS` for most hosts, because an emulated host may stand still for seconds without being lost;
- `SILENT_AFTER_ERROR_NS` for a host whose queue pairs fail at the same time, because the two together indicate a loss.

While engines start, `SILENT_STARTING_NS` replaces `SILENT_NS`.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from faultbed.testbed.errors import FaultbedError
from faultbed.traffic.engine.engine_client import TrafficLab

__all__ = [
    "PING_NS",
    "PROBE_S",
    "SILENT_AFTER_ERROR_NS",
    "SILENT_NS",
    "SILENT_STARTING_NS",
    "accepts_commands",
    "most_cut_off",
    "silent_hosts",
]

PING_NS = 1_000_000_000
"""Interval between two pings of the engine of each rank."""
SILENT_NS = 15_000_000_000
"""Silence after which a host counts as lost."""
SILENT_AFTER_ERROR_NS = 6_000_000_000
"""Silence after which a host with failing queue pairs counts as lost, and the time for replies in a diagnosis."""
SILENT_STARTING_NS = 60_000_000_000
"""Silence after which a host counts as lost while engines start: loading numpy on an emulated CPU takes seconds."""
PROBE_S = 3.0
"""Timeout of a command that checks a host, in seconds."""


def silent_hosts(
    heard_ns: Mapping[str, int],
    hosts: Iterable[str],
    now_ns: int,
    *,
    failing: Collection[str] = (),
    is_starting: bool = False,
) -> dict[str, int]:
    """Return the hosts that have been silent for too long, and for how many ns.

    `heard_ns` is when each host was last heard; a host without an entry is not silent. Queue pairs to the hosts in
    `failing` fail.
    """
    usual_ns = SILENT_STARTING_NS if is_starting else SILENT_NS
    silence_ns = {host: now_ns - heard_ns.get(host, now_ns) for host in hosts}
    return {
        host: silent_ns
        for host, silent_ns in silence_ns.items()
        if silent_ns > (SILENT_AFTER_ERROR_NS if host in failing else usual_ns)
    }


def accepts_commands(lab: TrafficLab, host: str) -> bool:
    """Return whether a host runs commands. A thread runs the probe, so a hung connection cannot block the job."""
    answers: list[bool] = []

    def run() -> None:
        with contextlib.suppress(FaultbedError):
            lab.node(host).run(["true"], timeout_s=PROBE_S)
            answers.append(True)

    probe = threading.Thread(target=run, name=f"probe of {host}", daemon=True)
    probe.start()
    probe.join(PROBE_S)
    return bool(answers)


def most_cut_off(connections: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return the host that most of some failed connections share, or no host if two are shared equally often.

    A connection is given by the hosts at its ends.
    """
    ranked = Counter(host for ends in connections for host in ends).most_common(2)
    if not ranked or (len(ranked) > 1 and ranked[0][1] == ranked[1][1]):
        return ()
    return (ranked[0][0],)
