"""The routing scheme in each pass: applied before all other parts, and removed after them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from faultbed.harness.experiment.declare.lab_names import LabNames
from faultbed.harness.experiment.experiment_file import Experiment
from faultbed.harness.experiment.fabric_file import Fabric
from faultbed.harness.live.routing import routing_scheme
from faultbed.harness.live.routing.fit_routing import fit_routing
from faultbed.harness.live.routing.routing_scheme import ActiveScheme
from faultbed.harness.live.routing.scheme_deviations import WorkloadTime, fault_times
from faultbed.harness.model.workload_traffic import demands_of_workload
from faultbed.harness.parts.passes import Active, Pass
from faultbed.harness.verdict import RoutingReceipt
from faultbed.testbed.observe.telemetry import Change
from faultbed.testbed.routing.schemes import SCHEMES
from faultbed.traffic.engine.engine_client import FabricModel

__all__ = ["Routing", "active_of", "bind", "outlives_s", "says"]


class Routing(Active):
    """The switches' routing scheme in one pass. Its receipt is kept even if the scheme cannot be applied."""

    def __init__(self, run: Pass, fabric: Fabric) -> None:
        self._run, self._fabric = run, fabric
        self._scheme: ActiveScheme | None = None

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Have the switches route by the scheme while the block lasts, and check at its end that they still do."""
        run, setting, fabric = self._run, self._run.setting, self._fabric
        lab = setting.lab
        run.progress(f"applying the routing scheme {fabric.routing}")
        demands = None
        if SCHEMES[fabric.routing].is_placed and fabric.demand == "schedule":
            model = FabricModel(kind=lab.kind, topology=lab.topology)
            demands = demands_of_workload(setting.experiment.workload, model)
        mutation = setting.mutations.get("routing")
        scheme = routing_scheme.scheme_of(lab, fabric, setting.journal, mutate=mutation, demands=demands)
        self._scheme = scheme
        # A comparison with a twin under another routing proves nothing.
        scheme.doubts += [f"fault-free {phase}: {why}" for phase, one in self._earlier() for why in one.not_applied()]
        with scheme.applied(setting.journal):
            decisions = scheme.decisions
            run.progress(f"{fabric.routing}: the kernels agree in {decisions.agreed} of {decisions.queried} decisions")
            yield
            self._check_end(scheme)

    def on_change(self, change: Change) -> None:
        """Tell the controller of a placed scheme, if there is one, what a machine's kernel reported."""
        if self._scheme is not None:
            self._scheme.on_change(change)

    def not_applied(self) -> tuple[str, ...]:
        """Return the reasons to believe that the switches did not route by the scheme in this pass."""
        return () if self._scheme is None else tuple(self._scheme.not_applied())

    def left(self) -> Iterable[str]:
        """Return one sentence if the scheme may still be on the switches."""
        return () if self._scheme is None else routing_scheme.not_removed(self._scheme.receipt())

    def sealed(self) -> RoutingReceipt | None:
        """Return the receipt of the scheme; None: the pass ended before it was applied."""
        return None if self._scheme is None else self._scheme.receipt()

    def _earlier(self) -> Iterator[tuple[str, Routing]]:
        for phase, one in self._run.earlier.items():
            yield from ((phase, part) for part in one.active.values() if isinstance(part, Routing))

    def _check_end(self, scheme: ActiveScheme) -> None:
        if self._run.phase != "measured":
            scheme.check_still_applied()
            return
        work, injected, readings = self._run.work, self._run.injected, self._run.readings
        paths = [path for paths_of_connection in work.paths.values() for path in paths_of_connection]
        span = WorkloadTime(
            begin_ns=work.began_ns,
            t0_ns=work.t0_ns,
            end_ns=work.end_ns,
            faults=fault_times(injected.planned, injected.receipts),
        )
        scheme.check_end(readings.before, readings.after, seconds=readings.counted_s, paths=paths, workload=span)


def active_of(run: Pass) -> Active | None:
    """Return the routing scheme of a pass; None: the experiment chooses none."""
    fabric = run.setting.experiment.fabric
    return None if fabric is None else Routing(run, fabric)


def bind(names: LabNames, experiment: Experiment, endpoints: Sequence[str]) -> Experiment:
    """Return the experiment as it is, if the lab supports its scheme for these RNICs of the workload.

    Raises:
        ConfigError: a weight for a link that the lab does not have.
        Unsupported: a rack lab, or switches without a choice of uplinks.
    """
    fit_routing(experiment, names.topology, names.lab.kind, endpoints)
    return experiment


def says(experiment: Experiment) -> Iterator[str]:
    """Yield a line with the scheme, its fidelity and its parameters."""
    if fabric := experiment.fabric:
        parameters = (f"{name} {value}" for name, value in fabric.parameters.items())
        chosen = ", ".join((SCHEMES[fabric.routing].fidelity, *parameters))
        yield f"routing scheme {fabric.routing} ({chosen}) on the switches while the workload runs"


def outlives_s(experiment: Experiment) -> float:
    """Return for how many seconds the scheme may stay on the switches after the process of the run has died."""
    return 0.0 if experiment.fabric is None else routing_scheme.MAX_SCHEME_LIFETIME_S
