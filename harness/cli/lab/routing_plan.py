"""`faultbed routing plan`: what to configure by hand so that a rack's switches route by a scheme."""

from __future__ import annotations

import dataclasses

import click

from faultbed.harness.cli.context import Session, json_option, pass_session
from faultbed.testbed.errors import UsageError
from faultbed.testbed.routing.bgp_preferences import SwitchConfiguration, switch_configurations
from faultbed.testbed.routing.schemes import SCHEMES, Routing
from faultbed.testbed.suggestions import hint

__all__ = ["routing_plan"]


@click.command("plan")
@click.argument("switches", nargs=-1)
@click.option(
    "--scheme",
    default="static-parity",
    show_default=True,
    type=click.Choice(tuple(SCHEMES)),
    help="Routing scheme of the lines.",
)
@click.option("--remove", is_flag=True, help="Print the lines that remove the scheme.")
@json_option
@pass_session
def routing_plan(session: Session, *, switches: tuple[str, ...], scheme: str, remove: bool, as_json: bool) -> None:
    """Print the FRR configuration (vtysh) by which SWITCHES (default: all) route by a scheme.

    Nothing is configured: on a rack only you do that. (On a soft lab, [fabric] of an experiment applies a scheme.)
    The lines prefer one of BGP's own paths for each prefix, so that a dead uplink is not used. They have run on the FRR
    of soft labs, not yet on hardware, and are lost when FRR restarts. They replace a neighbour's inbound route-map:
    look for one first, with `show running-config bgpd`.

    \b
      faultbed --lab inventory/rack-h100.example.yml routing plan --scheme static-parity rtsw1
    """  # noqa: D301 - that is click's sign for a paragraph that keeps its lines, and must be the character itself
    topology = session.inventory().topology
    configured = switch_configurations(topology, scheme, Routing())
    known = [configuration.switch for configuration in configured]
    if unknown := [name for name in switches if name not in known]:
        raise UsageError(f"no switch {', '.join(unknown)} with a choice of uplinks; {hint(unknown[0], known)}")
    chosen = [configuration for configuration in configured if not switches or configuration.switch in switches]
    if as_json:
        session.json({"scheme": scheme, "switches": [dataclasses.asdict(configuration) for configuration in chosen]})
        return
    for configuration in chosen:
        _print(session, configuration, remove=remove)


def _print(session: Session, configuration: SwitchConfiguration, *, remove: bool) -> None:
    session.out.print(f"! {configuration.switch}")
    for line in configuration.remove if remove else configuration.apply:
        session.out.print(line)
    if not remove:
        session.out.print(
            f"! then `show ip route` has one next hop for each of these {len(configuration.uplink_by_prefix)} prefixes"
        )
