"""Commands of traffic engineering: `te run` places the flows of a lab's RNICs by hand."""

from __future__ import annotations

from typing import Any, Literal

import click
import msgspec
import numpy as np

from faultbed.harness.cli.command_group import Commands
from faultbed.harness.cli.context import Session, json_option, pass_session
from faultbed.harness.cli.lab.routing_commands import job_of, of_a_job
from faultbed.harness.cli.options.numbers import parse_duration
from faultbed.harness.experiment.fabric_file import Fabric
from faultbed.harness.live.routing.fit_routing import require_scheme
from faultbed.harness.model.routing_prediction import demands_of, flows_of
from faultbed.harness.run.flow_placement_run import place_flows_for
from faultbed.harness.verdict import ExitCode
from faultbed.testbed.errors import UsageError

__all__ = ["COMMANDS"]


@click.group(cls=Commands)
def te() -> None:
    """Traffic engineering: place the flows of a lab's RNICs on uplinks."""


@te.command("run")
@click.option("--for", "duration", default="60s", show_default=True, metavar="TIME", help="How long.")
@click.option("--cycle", default="5s", show_default=True, help="Time from one placement to the next.")
@click.option("--backdoor/--no-backdoor", default=True, help="Place flows as soon as a switch reports a change.")
@click.option(
    "--demand",
    default="measured",
    show_default=True,
    type=click.Choice(("measured", "schedule")),
    help="Place what ports counted in the last cycle, or the job of the options below.",
)
@of_a_job
@json_option
@pass_session
def te_run(
    session: Session,
    /,
    *,
    duration: str,
    cycle: str,
    backdoor: bool,
    demand: Literal["measured", "schedule"],
    as_json: bool,
    **job: Any,
) -> int:
    """Place flows on the uplinks of a soft lab for a while, beside whatever other commands send.

    The switches' rules last as long as this command: if it is killed, its lease ends, and every packet takes BGP's
    ECMP. A second controller on the lab is refused. Exits with 2 if the switches did not have the rules all the time,
    and with 5 if the lab has changed.

    \b
      faultbed --lab soft-3rack te run --for 60s
    """  # noqa: D301 - that is click's sign for a paragraph that keeps its lines, and must be the character itself
    inventory = session.inventory()
    seconds, cycle_s = parse_duration(duration), parse_duration(cycle)
    if cycle_s < 1:
        raise UsageError(f"--cycle {cycle}: a placement takes about as long; write at least 1s")
    fabric = Fabric(routing="te", cycle=cycle_s, backdoor=backdoor, demand=demand)
    require_scheme(fabric, inventory.topology, inventory.kind, "te run")
    demands = {}
    if demand == "schedule":
        placed, traffic = job_of(inventory, **job)
        demands = demands_of(flows_of(traffic, placed, np.random.default_rng(1)))
    # Rules on the switches reach every host of a lab.
    with session.working(inventory, (), why="te run") as lab, session.progress() as progress:
        result = place_flows_for(lab, fabric, demands, seconds, progress)
    record = result.placements
    if as_json:
        session.json(
            {
                "placements": None if record is None else msgspec.to_builtins(record),
                "doubts": result.doubts,
                "lab_state": result.lab_state,
            }
        )
    else:
        cycles, count = (0, 0) if record is None else (record.cycles, len(record.placements))
        session.out.print(f"te: {count} placements in {cycles} cycles; the lab is {result.lab_state}")
        for doubt in result.doubts:
            session.out.print(f"not proven: {doubt}", soft_wrap=True)
    if result.lab_state == "DIRTY":
        return ExitCode.DIRTY
    return ExitCode.INCONCLUSIVE if result.doubts else ExitCode.PASS


COMMANDS = (te,)
