"""Commands about sharing a lab: reserve, release."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from faultbed.harness.cli.context import Session, json_option, pass_session
from faultbed.harness.cli.options.numbers import parse_duration
from faultbed.testbed.directories import lab_dir
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.tenancy import audit_log, reservation
from faultbed.testbed.tenancy.lab_lease import is_dead, owner, reserve_by_hand, store_of
from faultbed.testbed.tenancy.reservation import Entry
from faultbed.testbed.tenancy.reservation_store import Reading

__all__ = ["COMMANDS", "entries_of", "show_entries", "to_json"]


@click.command()
@click.argument("names", nargs=-1)
@click.option("--for", "duration", default="1h", show_default=True, metavar="TIME", help="Duration: 30m, 2h.")
@click.option("--why", default="no reason given", metavar="TEXT", help="Reason that other users see in their refusal.")
@json_option
@pass_session
def reserve(session: Session, *, names: tuple[str, ...], duration: str, why: str, as_json: bool) -> None:
    """Reserve NAMES (hosts, switches, links; without any, the whole lab) for yourself.

    Until the reservation ends, your commands must stay within NAMES, and commands of other users that need them are
    refused with your name and reason. `run`, `inject`, `traffic` and pytest reserve what they need while they run; this
    command covers the time in between. A second call replaces the first one.
    """
    entry, now = reserve_by_hand(session.inventory(), names, for_s=parse_duration(duration), why=why)
    if as_json:
        session.json(to_json(entry, now.now_s))
    else:
        session.err.print(f"reserved: {', '.join(entry.covers)}, for {duration}; `faultbed release` ends it")


@click.command()
@click.argument("names", nargs=-1)
@click.option(
    "--force", is_flag=True, help="Also end reservations of other users. Use it only if their sessions are gone."
)
@json_option
@pass_session
def release(session: Session, *, names: tuple[str, ...], force: bool, as_json: bool) -> None:
    """End reservations that were made by `reserve`.

    With NAMES (hosts, switches, links), only reservations that cover one of them, also with --force.
    """
    inventory = session.inventory()
    named = reservation.covered(inventory.topology, names)
    ended: list[Entry] = []

    def rule(now: Reading) -> reservation.Book:
        mine = owner()
        ended[:] = [
            entry
            for entry in now.book
            if reservation.overlap(entry.covers, named) and (force or (entry.owner, entry.mode) == (mine, "booking"))
        ]
        return tuple(entry for entry in now.book if entry not in ended)

    now = store_of(inventory).change(rule)
    for entry in ended:
        if entry.owner != owner():
            detail = reservation.describe(entry, now_s=now.now_s)
            target = " ".join(entry.covers)
            audit_log.append(lab_dir(inventory.name), "released by force", target=target, detail=detail)
    if as_json:
        session.json([to_json(entry, now.now_s) for entry in ended])
        return
    for entry in ended:
        session.err.print(f"released: {', '.join(entry.covers)} ({reservation.describe(entry, now_s=now.now_s)})")
    if not ended:
        session.err.print("nothing was reserved by you")


def entries_of(inventory: Inventory) -> tuple[tuple[Entry, ...], float]:
    """Return the lab's live reservations, and the time at their store in s."""
    now = store_of(inventory).read()
    return reservation.live(now.book, now_s=now.now_s, is_dead=is_dead), now.now_s


def show_entries(session: Session, entries: tuple[Entry, ...], now_s: float) -> None:
    """Print a table of reservations, if there are any."""
    if entries:
        rows = [
            (
                "whole lab" if reservation.WHOLE_LAB in entry.covers else ", ".join(entry.covers),
                entry.mode,
                entry.who,
                entry.why,
                f"{(now_s - entry.since_s) / 60:.0f} min",
                f"{(entry.until_s - now_s) / 60:.0f} min",
            )
            for entry in entries
        ]
        session.table(("reserved", "how", "by", "why", "since", "left"), rows)


def to_json(entry: Entry, now_s: float) -> dict[str, Any]:
    """Return a reservation as plain data, with the remaining seconds."""
    fields: dict[str, Any] = msgspec.to_builtins(entry)
    return {**fields, "left_s": entry.until_s - now_s}


COMMANDS = (reserve, release)
