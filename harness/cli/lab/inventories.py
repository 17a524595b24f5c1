"""Commands about inventories: inventory check, inventory discover."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import click

from faultbed.harness.cli.command_group import Commands
from faultbed.harness.cli.context import Session, json_option, pass_session
from faultbed.harness.verdict import ExitCode
from faultbed.testbed.discover import draft, live
from faultbed.testbed.errors import Unreachable, UsageError
from faultbed.testbed.inventory import audit
from faultbed.testbed.inventory.lab_inventory import Management, load
from faultbed.testbed.lab import open_lab, open_machine
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.testbed.remote.remote_node import Node
from faultbed.testbed.tenancy.lab_lease import hold

__all__ = ["COMMANDS"]


@click.group(cls=Commands)
def inventory() -> None:
    """Check an inventory, or write one from live machines."""


@inventory.command()
@click.option("--reach", is_flag=True, help="Also try machines by SSH, BMCs and PDUs (rack labs).")
@json_option
@pass_session
def check(session: Session, *, reach: bool, as_json: bool) -> int:
    """List all errors of the inventory of --lab, each with its place and its remedy.

    For example duplicate addresses, contradicting cables, an MTU that narrows along a path, addresses outside the IP
    plan, or a contradictory QoS profile. Exits with 0 without findings, with 1 with findings, and with 4 if the file is
    not an inventory.
    """
    path = session.inventory_path()
    findings = audit.audit(path)
    if reach and not findings:
        findings = audit.unreachable(load(path))
    if as_json:
        session.json([dataclasses.asdict(finding) for finding in findings])
    else:
        if findings:
            rows = [(finding.place, finding.what, finding.do) for finding in findings]
            session.table(("where", "what", "do"), rows)
        session.out.print(f"{path}: {len(findings) or 'nothing'} wrong", soft_wrap=True)
    return ExitCode.FAIL if findings else ExitCode.PASS


@inventory.command()
@click.argument("machines", nargs=-1, metavar="[NAME=[USER@]ADDRESS[:PORT]]...")
@click.option("--name", "lab_name", help="Name of the lab; default: that of --lab, or `discovered`.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the draft there (must be new), not on stdout."
)
@json_option
@pass_session
def discover(
    session: Session, *, machines: tuple[str, ...], lab_name: str | None, out: Path | None, as_json: bool
) -> int:
    """Write a draft inventory of live machines: their RNICs, GPUs, addresses, BGP sessions and cables.

    Give hosts and switches by name and address (`host1=192.0.2.11 rtsw1=admin@192.0.2.101`). Without any, the machines
    of --lab are queried; only their names and addresses are taken from its inventory. Cables are inferred from LLDP,
    neighbours' MAC addresses, subnets and BGP. What stays unknown, such as machines that do not answer, is listed, also
    at the head of the draft. Nothing is changed. Exits with 0 if the draft is complete, with 1 if something is unknown.
    """
    if out is not None and out.exists():
        raise UsageError(f"--out {out}: exists already, and a draft overwrites nothing; give a new name")
    if machines:
        drafted = _of_machines(session, live.parse_seeds(machines), lab_name or "discovered")
    else:
        drafted = _of_lab(session, lab_name)
    if out is not None:
        out.write_text(draft.text(drafted), encoding="utf-8")
    if as_json:
        session.json(dataclasses.asdict(drafted))
    elif out is None:
        sys.stdout.write(draft.text(drafted))
    else:
        rows = [(item.place, item.what, item.do) for item in drafted.gaps]
        if rows:
            session.table(("open", "what", "do"), rows)
        cables = ", ".join(f"{count} by {by}" for by, count in drafted.cables.items()) or "none"
        session.out.print(f"{out}: cables: {cables}; {len(rows) or 'nothing'} open", soft_wrap=True)
    return ExitCode.FAIL if drafted.gaps else ExitCode.PASS


def _of_lab(session: Session, lab_name: str | None) -> draft.Draft:
    inventory = session.inventory()
    with (
        open_lab(inventory) as lab,
        hold(inventory, why="inventory discover", mode="exclusive"),
        session.progress() as progress,
    ):
        unreachable: dict[str, str] = {}
        answered = live.query({name: lab.node(name) for name in lab.nodes()}, progress, unreachable=unreachable)
    # The SSH ports of a soft lab's machines are chosen each time it starts, so they do not belong in its inventory.
    access = (
        {}
        if traits_of(inventory.kind).is_emulated
        else {name: _access_vars(management) for name, management in inventory.management.items()}
    )
    return draft.draft(answered, name=lab_name or inventory.name, access=access, unreachable=unreachable)


def _of_machines(session: Session, seeds: dict[str, Management], lab_name: str) -> draft.Draft:
    nodes, unreachable = dict[str, Node](), dict[str, str]()
    for name, management in seeds.items():
        try:
            nodes[name] = open_machine(name, management)
        except Unreachable as error:  # its host key is not pinned
            unreachable[name] = str(error)
    with session.progress() as progress:
        answered = live.query(nodes, progress, unreachable=unreachable)
    access = {name: _access_vars(management) for name, management in seeds.items()}
    return draft.draft(answered, name=lab_name, access=access, unreachable=unreachable)


def _access_vars(management: Management) -> dict[str, Any]:
    ansible_vars = {
        "ansible_host": management.address,
        "ansible_port": management.port,
        "ansible_user": management.user,
    }
    return {key: value for key, value in ansible_vars.items() if value is not None}


COMMANDS = (inventory,)
