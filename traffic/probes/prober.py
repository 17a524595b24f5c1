"""Probes on every path through the fabric: datagrams between RNICs, on enough queue pairs for ECMP to spread them.

Each RNIC sends to one RNIC in its own rack and to one in every other rack. Every host's link then carries probes in
both directions, and most probably every uplink does: the switches' kernels report which uplinks were used, and
uncovered links are listed. The process at the other end answers each probe that arrives, and separates its own delay
from the network's round trip. `faultbed.traffic.probes.results` finds the locations of loss and delay.

`run` probes a lab for a fixed time. `start` probes in the background until it is stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Self

from faultbed.testbed.errors import LabError, UsageError
from faultbed.testbed.finite import require_finite
from faultbed.testbed.lab import Lab
from faultbed.testbed.model.topology import Topology
from faultbed.traffic.engine.engine_client import Engines
from faultbed.traffic.engine.running_traffic import OnEvent, Running
from faultbed.traffic.engine.task_specs import QpParams
from faultbed.traffic.flows import flow_run
from faultbed.traffic.flows.flow_run import FlowSpec, FlowsResult
from faultbed.traffic.probes import results, rtt, tomography
from faultbed.traffic.probes.paths import PathTracker, trips
from faultbed.traffic.probes.results import ProbeTrips
from faultbed.traffic.probes.rtt import Echo, PathTimes, SlowPlace
from faultbed.traffic.probes.tomography import Probes, Suspect

__all__ = ["ProbeResult", "ProbeSpec", "Probing", "check", "pairs", "run", "start"]

STOP_TIMEOUT_S = 120.0
MODULE = "faultbed.traffic.node.probe_engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSpec:
    """`per_s` datagrams per second of `size_bytes` on each of `qps` queue pairs between two RNICs, for `duration_s`."""

    duration_s: float = 5.0
    per_s: float = 20.0
    qps: int = 4
    size_bytes: int = 64
    qp: QpParams = field(default_factory=QpParams)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """Result of probing a lab.

    `paths` are the round trips by path there and back, `slow` the places that make them long. `stamps` is the source of
    the timestamps. `uncovered` are directed links that no probe crossed. `moved` counts the probes that are left out,
    because their path was changing and is not known. Of these, `moved_lost` were lost, or their answers were; where is
    unknown.
    """

    spec: ProbeSpec
    probes: tuple[Probes, ...]
    suspects: tuple[Suspect, ...]
    links: Mapping[str, tuple[int, int]]
    uncovered: tuple[str, ...]
    moved: int
    moved_lost: int
    paths: tuple[PathTimes, ...]
    slow: tuple[SlowPlace, ...]
    stamps: str = rtt.STAMPS

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, ready for JSON."""
        data = asdict(self)
        data["suspects"] = [{**asdict(place), "names": place.names} for place in self.suspects]
        data["slow"] = [{**asdict(place), "names": place.names} for place in self.slow]
        data["paths"] = [{**asdict(place), "slow": place.slow} for place in self.paths]
        return data


def check(spec: ProbeSpec) -> None:
    """Reject a spec that is invalid on every lab.

    Raises:
        UsageError: a value is invalid.
    """
    require_finite(spec)
    if spec.duration_s <= 0 or spec.per_s <= 0 or spec.qps < 1:
        raise UsageError("probes need a duration, a rate and a number of queue pairs above 0")


def pairs(topology: Topology) -> tuple[tuple[str, str], ...]:
    """Return (source, destination) of every flow of probes: each RNIC sends to one RNIC in each rack."""
    racks: dict[str, list[str]] = {}
    for host in topology.hosts:
        racks.setdefault(host.rack, []).append(host.name)
    chosen = []
    for host in topology.hosts:
        place = racks[host.rack].index(host.name)
        for number, rnic in enumerate(host.rnics):
            for rack, names in racks.items():
                shift = 1 if rack == host.rack else number
                other = topology.host_by_name[names[(place + shift) % len(names)]]
                if other.name != host.name and number < len(other.rnics):
                    chosen.append((f"{host.name}:{rnic.name}", f"{other.name}:{other.rnics[number].name}"))
    return tuple(chosen)


class Probing:
    """Probes that run until `stop`; created by `start`. Nothing is left after its `with` block."""

    def __init__(self, lab: Lab, engines: Engines, running: Running[FlowsResult]) -> None:
        self._engines = engines
        self._running = running
        self._tracker = PathTracker(lab, lambda: running.connections)
        self._echoes: tuple[Echo, ...] = ()
        self._failure: str | None = None

    def report_change(self) -> None:
        """Report that links or routes changed, so that paths are queried again.

        Any thread may call this; it does not block.
        """
        self._tracker.report_change()

    def stop(self) -> None:
        """Stop the probes, and wait for those in flight."""
        self._running.stop()
        self.wait(STOP_TIMEOUT_S)

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of the probes."""
        try:
            result = self._running.wait(timeout_s)
        except LabError as error:
            self._failure = str(error)
        else:
            self._failure = result.where if result.outcome == "failed" else None
            # Keep the probes of a failed run, too: a host that rebooted is a reason to look at them.
            self._echoes = tuple(echo for flow in result.flows for echo in flow.echoes)
        self._tracker.close()

    @property
    def lost(self) -> int:
        """Number of probes that were lost, or whose answer was, after the end."""
        return sum(echo.is_lost for echo in self._echoes)

    def collected(self) -> ProbeTrips:
        """Return the probes and their paths, after the end."""
        known, unknown = trips(self._echoes, self._tracker.queries)
        return ProbeTrips(
            trips=known, unknown=unknown, trouble=self._failure or (None if known else self._tracker.failure)
        )

    def __enter__(self) -> Self:
        try:
            self._tracker.open()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tracker.close()
        self._end()

    def _end(self) -> None:
        self._running.__exit__()
        self._engines.close()


def start(lab: Lab, spec: ProbeSpec, on_event: OnEvent | None = None) -> Probing:
    """Start probing, for use in a `with` block. It ends after `spec.duration_s`, or at `stop`.

    Raises:
        UsageError: the lab has no two hosts to probe between.
        LabError: the probes could not be started; nothing is left running.
    """
    check(spec)
    chosen = pairs(lab.topology)
    if not chosen:
        raise UsageError(f"{lab.name} has no two hosts with RNICs: there is nothing to probe")
    specs = [
        FlowSpec(
            src=src,
            dst=dst,
            verb="send",
            transport="ud",
            message_bytes=spec.size_bytes,
            qps=spec.qps,
            spread="round-robin",
            rate_bps=spec.per_s * spec.qps * spec.size_bytes * 8,
            duration_s=spec.duration_s,
            echo=True,
            qp=spec.qp,
            peer_deadline_s=spec.duration_s + STOP_TIMEOUT_S,
        )
        for src, dst in chosen
    ]
    hosts = [end.partition(":")[0] for pair in chosen for end in pair]
    engines = Engines.start(lab, hosts, module=MODULE)  # `start_all` closes them if it fails
    return Probing(lab, engines, flow_run.start_all(lab, specs, on_event, engines=engines))


def run(lab: Lab, spec: ProbeSpec, on_event: OnEvent | None = None) -> ProbeResult:
    """Probe a lab for `spec.duration_s` and return the result.

    Raises:
        UsageError: the lab has no two hosts to probe between.
        LabError: the probes did not run.
    """
    with start(lab, spec, on_event) as probing:
        probing.wait(spec.duration_s + STOP_TIMEOUT_S)
    collected = probing.collected()
    if collected.trouble is not None:
        raise LabError(f"the probes failed: {collected.trouble}")
    probes, paths = results.one_way(collected.trips), rtt.times_of(collected.trips)
    return ProbeResult(
        spec=spec,
        probes=probes,
        suspects=tomography.locate(probes),
        links={" -> ".join(link): count for link, count in sorted(tomography.links_of(probes).items())},
        uncovered=results.uncovered(lab.topology, probes),
        moved=collected.unknown,
        moved_lost=probing.lost - sum(trip.echo.is_lost for trip in collected.trips),
        paths=paths,
        slow=rtt.locate(paths),
    )
