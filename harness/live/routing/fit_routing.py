"""Check that a lab supports a routing scheme, before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence

from faultbed.harness.experiment.experiment_file import Experiment
from faultbed.harness.experiment.fabric_file import Fabric
from faultbed.harness.model.workload_traffic import demands_of_workload
from faultbed.testbed.errors import ConfigError, Unsupported, UsageError
from faultbed.testbed.model.lab_kind import LabKind, traits_of
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.routing.schemes import SCHEMES
from faultbed.testbed.routing.switch_tables import scheme_tables
from faultbed.testbed.suggestions import hint
from faultbed.traffic.engine.engine_client import FabricModel, endpoint

__all__ = ["fit_routing", "require_scheme"]


def require_scheme(fabric: Fabric, topology: Topology, lab_kind: LabKind, where: str) -> None:
    """Reject a scheme that a lab's switches do not support; `where` names the option or key that requests it.

    Raises:
        Unsupported: a rack lab, or switches without a choice of uplinks.
    """
    if not traits_of(lab_kind).applies_routing:
        raise Unsupported(
            f"{where}: faultbed does not configure a rack's switches. Leave the scheme out and configure it by hand: "
            f"`faultbed routing plan --scheme {fabric.routing}` prints the lines for each switch, or why there are none"
        )
    try:
        scheme_tables(topology, fabric.routing, fabric.as_routing)
    except Unsupported as error:
        raise Unsupported(f"{where}: {error}") from error


def fit_routing(experiment: Experiment, topology: Topology, lab_kind: LabKind, endpoints: Sequence[str]) -> None:
    """Reject a scheme that the lab does not support; `endpoints` are the workload's RNICs, or hosts (the first RNIC).

    Raises:
        ConfigError: a weight for a link that the lab does not have.
        Unsupported: a rack lab, or switches without a choice of uplinks.
    """
    fabric, routing = experiment.fabric, experiment.at("fabric.routing")
    if fabric is None:
        return
    require_scheme(fabric, topology, lab_kind, routing)
    if SCHEMES[fabric.routing].shares == "buckets":
        tables = scheme_tables(topology, fabric.routing, fabric.as_routing)
        most = max(len(hops) for switch in tables.switches.values() for hops in switch.hops.values())
        if fabric.buckets < most:
            problem = f"is less than the {most} next hops of a group, so that one would have no bucket"
            raise ConfigError(f"{experiment.at('fabric.buckets')}: {fabric.buckets} {problem}; write at least {most}")
    if SCHEMES[fabric.routing].is_placed and fabric.demand == "schedule":
        try:
            demands_of_workload(experiment.workload, FabricModel(kind=lab_kind, topology=topology))
        except UsageError as error:
            raise ConfigError(f"{experiment.at('fabric.demand')}: schedule: {error}") from error
    names = [link.name for link in topology.uplinks]
    for name in fabric.weights:
        if name not in names:
            weights = experiment.at("fabric.weights")
            raise ConfigError(f'{weights}: no link between switches "{name}"; {hint(name, names)}')
    for name in endpoints:
        rank = endpoint(topology, name)
        switch = topology.rnic_link(rank.host, rank.rnic).a.node
        count = sum(link.a.node == switch for link in topology.uplinks)
        if count < 2:  # noqa: PLR2004 - one uplink is no choice
            uplinks = "no uplink" if not count else "one uplink"
            raise Unsupported(
                f"{routing}: {fabric.routing} needs two uplinks of every rank's switch; {switch}, "
                f"the switch of {rank.name}, has {uplinks}"
            )
