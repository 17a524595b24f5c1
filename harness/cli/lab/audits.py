"""Commands about safety on labs that others use too: audit, power-cycle."""

from __future__ import annotations

import contextlib
import dataclasses

import click
from rich.text import Text

from faultbed.harness.cli.context import Session, json_option, pass_session
from faultbed.testbed.backends.rack import power_cycle as powercycle
from faultbed.testbed.backends.rack import power_cycled
from faultbed.testbed.directories import lab_dir
from faultbed.testbed.errors import FaultbedError, UsageError
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.lab import open_machine
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
@click.option("--confirm", metavar="HOST", help="Repeat HOST to run the commands and wait until it is back.")
@json_option
@pass_session
def power_cycle(session: Session, *, host: str, confirm: str | None, as_json: bool) -> None:
    """Print the commands that power-cycle HOST by its BMC; run them only with --confirm HOST.

    Allowed only by the inventory's faultbed_safety, while the lab is DIRTY, and for a host without another
    reservation. With --confirm the command waits until the host has booted and answers, and fails if it does not. The
    lab stays DIRTY: provision the host again, then run `faultbed heal`. Not yet run on hardware.
    """
    inventory = session.inventory()
    state = lab_dir(inventory.name)
    try:
        if confirm not in (None, host):
            raise UsageError(f'--confirm "{confirm}" is not {host}: repeat the name of the host')
        planned = powercycle.plan(inventory, host, dirty=dirty.is_marked(state))
        holding = contextlib.ExitStack()
        holding.enter_context(hold(inventory, [host], why=f"power-cycle {host}", mode="exclusive"))
    except FaultbedError as error:
        audit_log.append(state, "power-cycle refused", target=host, detail=str(error))
        raise
    with holding:
        if confirm is not None:
            _carry_out(session, inventory, planned, as_json=as_json)
            return
    audit_log.append(state, "power-cycle planned", target=host, detail=planned.bmc, do=planned.commands)
    if as_json:
        session.json(dataclasses.asdict(planned))
        return
    warning = f" of {host}: it cannot be reverted; nothing is done: run these by hand, or use --confirm"
    session.out.print(Text.assemble(("power cycle", "bold"), warning))
    for command in planned.commands:
        session.out.print(f"  {command}", soft_wrap=True)


def _carry_out(session: Session, inventory: Inventory, planned: powercycle.PowerCycle, *, as_json: bool) -> None:
    """Power-cycle a host, wait until it is back, and record both before and after."""
    state = lab_dir(inventory.name)
    audit_log.append(state, "power-cycling", target=planned.host, detail=planned.bmc, do=planned.commands)
    node = open_machine(planned.host, inventory.management[planned.host])
    try:
        with session.progress() as progress:
            took_s = power_cycled.carry_out(planned, lambda: power_cycled.boot_of(node), progress=progress)
    except BaseException as error:
        audit_log.try_to_append(state, "power cycle failed", target=planned.host, detail=audit_log.error_text(error))
        raise
    audit_log.append(state, "power-cycled", target=planned.host, detail=f"back after {took_s:.0f} s")
    if as_json:
        session.json({**dataclasses.asdict(planned), "back_after_s": took_s})
        return
    session.out.print(
        f"{planned.host} has booted and answers, {took_s:.0f} s after the cycle began; provision it again, then run "
        "`faultbed heal`",
        soft_wrap=True,
    )


COMMANDS = (audit, power_cycle)
