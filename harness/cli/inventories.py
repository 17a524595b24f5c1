"""Commands about inventories: inventory check."""

from __future__ import annotations

import dataclasses

import click

from harness.cli.context import Session, json_option, pass_session
from harness.verdict import ExitCode
from testbed import inventory_audit
from testbed.inventory import load

__all__ = ["COMMANDS"]


@click.group()
def inventory() -> None:
    """Look at an inventory, without touching its lab."""


@inventory.command()
@click.option("--reach", is_flag=True, help="Also try each machine's SSH port (rack labs).")
@json_option
@pass_session
def check(session: Session, *, reach: bool, as_json: bool) -> int:
    """Find everything wrong in the inventory of --lab: each finding with its place and what to do.

    Duplicate addresses, cabling that does not match, an MTU that shrinks on the way, addresses outside the IP plan, a
    QoS profile that contradicts itself. Ends with 0 when nothing is wrong, 1 when something is, 4 when the file is no
    inventory at all.
    """
    path = session.inventory_path()
    findings = inventory_audit.audit(path)
    if reach and not findings:
        findings = inventory_audit.unreachable(load(path))
    if as_json:
        session.json([dataclasses.asdict(finding) for finding in findings])
    else:
        if findings:
            rows = [(finding.place, finding.what, finding.do) for finding in findings]
            session.table(("where", "what", "do"), rows)
        session.out.print(f"{path}: {len(findings) or 'nothing'} wrong", soft_wrap=True)
    return ExitCode.FAIL if findings else ExitCode.PASS


COMMANDS = (inventory,)
