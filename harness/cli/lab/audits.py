"""Commands about safety on labs that others use too: audit, power-cycle."""

from __future__ import annotations

import dataclasses

import click
from rich.text import Text

from faultbed.harness.cli.context import Session, json_option, pass_session
from faultbed.testbed.backends.rack import power_cycle as powercycle
from faultbed.testbed.directories import lab_dir
from faultbed.testbed.errors import FaultbedError
from faultbed.testbed.tenancy import audit_log, dirty
from faultbed.testbed.tenancy.lab_lease import hold

__all__ = ["COMMANDS"]


@click.command()
@click.option("--last", default=20, show_default=True, help="Number of lines, newest last.")
@json_option
@pass_session
def audit(session: Session, *, last: int, as_json: bool) -> None:
    """Show who changed the lab from this machine, when, what, and how it is reverted."""
    entries = list(audit_log.entries(lab_dir(session.inventory().name)))[-last:]
    if as_json:
        session.json(entries)
        return
    rows = [
        (
            str(entry.get("at", ""))[:19],
            str(entry.get("who", "")),
            str(entry.get("event", "")),
            f"{entry.get('kind', '')} {entry.get('target', '')}".strip(),
            str(entry.get("detail", "")) or "; ".join(entry.get("revert", ())),
        )
        for entry in entries
    ]
    session.table(("when (UTC)", "who", "", "what", "revert, or why"), rows)


@click.command("power-cycle")
@click.argument("host")
@json_option
@pass_session
def power_cycle(session: Session, *, host: str, as_json: bool) -> None:
    """Print the commands that would power-cycle HOST by its BMC, and run nothing.

    Allowed only by the inventory's faultbed_safety, while the lab is DIRTY, and for a host without another
    reservation. Not yet run on hardware.
    """
    inventory = session.inventory()
    state = lab_dir(inventory.name)
    try:
        planned = powercycle.plan(inventory, host, dirty=dirty.is_marked(state))
        with hold(inventory, [host], why=f"power-cycle {host}", mode="exclusive"):
            pass
    except FaultbedError as error:
        audit_log.append(state, "power-cycle refused", target=host, detail=str(error))
        raise
    audit_log.append(state, "power-cycle planned", target=host, detail=planned.bmc, do=planned.commands)
    if as_json:
        session.json(dataclasses.asdict(planned))
        return
    warning = f" of {host}: it cannot be reverted; nothing is done, run these by hand"
    session.out.print(Text.assemble(("power cycle", "bold"), warning))
    for command in planned.commands:
        session.out.print(f"  {command}", soft_wrap=True)


COMMANDS = (audit, power_cycle)
