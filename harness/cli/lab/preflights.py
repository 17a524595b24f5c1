"""The command preflight."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.text import Text

from faultbed.harness.cli.context import Session, json_option, pass_session, styled
from faultbed.harness.run.prepare import exclusions
from faultbed.harness.run.prepare import preflight as preflight_module
from faultbed.harness.verdict import ExitCode
from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.lab import open_lab
from faultbed.testbed.preflight import busbw as busbw_module
from faultbed.testbed.preflight import support_bundle as support_bundle_module
from faultbed.testbed.preflight.checks import PreflightFinding
from faultbed.testbed.suggestions import first_of
from faultbed.testbed.tenancy.lab_lease import hold
from faultbed.traffic.flows.burnin import Burnin

__all__ = ["COMMANDS"]


@click.command()
@click.argument("hosts", nargs=-1)
@click.option("--no-burn-in", is_flag=True, help="Check without measuring pairs of RNICs.")
@click.option(
    "--leave-out",
    is_flag=True,
    help="Exit with 0 if the lab is right without the hosts to leave out, which include hosts that do not answer.",
)
@click.option("--list", "only_list", is_flag=True, help="List the checks with their method and expected state.")
@click.option(
    "--busbw",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Only compare the output of nccl-tests in FILE with the inventory's faultbed_busbw. The lab is not used.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the JSON of --json to this file, with the time.",
)
@json_option
@pass_session
def preflight(
    session: Session,
    *,
    hosts: tuple[str, ...],
    no_burn_in: bool,
    leave_out: bool,
    only_list: bool,
    busbw: Path | None,
    out: Path | None,
    as_json: bool,
) -> int:
    """Compare the lab with its inventory, and all pairs of RNICs with each other. Changes nothing.

    Checks links, MTU on both ends, GIDs, queues, hash policy, routes, BGP, ECMP width, clocks, leftovers and stale
    reservations. Then measures latency and bandwidth of every pair of RNICs, and lists outliers. Exits with 0 without
    findings, else with 1. Checks that were not possible are listed with the reason. Unfit hosts are named; `faultbed
    run --leave-out`, or --without HOST, excludes them.

    With HOSTS, only these, their cables and the fabric are checked, only pairs among them are measured, and only they
    are reserved. Active faults of other users in the fabric are reported as leftovers.
    """
    inventory = session.inventory()
    if busbw is not None:
        return _busbw(session, inventory, busbw, as_json=as_json)
    if only_list:
        return _list_checks(session, inventory, as_json=as_json)
    inventory = exclusions.restrict_to(inventory, hosts)
    with (
        open_lab(inventory) as lab,
        hold(inventory, hosts, why="preflight", mode="exclusive") as holding,
        session.progress() as progress,
    ):
        lab.guard = holding.refresh
        result = preflight_module.preflight(lab, progress, with_burnin=not no_burn_in, leave_out=leave_out)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        dated = {"at": datetime.now(UTC).isoformat(timespec="seconds"), **result.to_dict()}
        out.write_text(json.dumps(dated, indent=2) + "\n", encoding="utf-8")
    if as_json:
        session.json(result.to_dict())
    else:
        _show(session, result)
    return ExitCode.FAIL if (result.remaining if leave_out else result.findings) else ExitCode.PASS


def _list_checks(session: Session, inventory: Inventory, *, as_json: bool) -> int:
    rows = [
        (check.name, check.method, check.expected)
        for check in preflight_module.ALL_CHECKS
        if inventory.kind in check.labs
    ]
    if as_json:
        session.json([{"name": name, "how": method, "right": expected} for name, method, expected in rows])
    else:
        session.table(("check", "reads", "expected"), rows)
    return ExitCode.PASS


def _busbw(session: Session, inventory: Inventory, file: Path, *, as_json: bool) -> int:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"--busbw {file}: cannot be read: {error.strerror}") from None
    try:
        run = busbw_module.read(text)
        short = busbw_module.compare(run, inventory.busbw)
    except UsageError as error:
        raise UsageError(f"--busbw {file}: {error}") from None
    if as_json:
        session.json({"run": asdict(run), "short": [_shortfall_dict(shortfall) for shortfall in short]})
    else:
        if short:
            session.table(
                ("where", "found", "expected"),
                [(shortfall.where, shortfall.observed, shortfall.expected) for shortfall in short],
            )
        unchecked = sum(line.wrong is None for line in run.lines)
        data = f"; the data of {unchecked} sizes were not checked (-c 0)" if unchecked else ""
        session.out.print(f"{file}: {len(short) or 'nothing'} short in {len(run.lines)} sizes{data}", soft_wrap=True)
    return ExitCode.FAIL if short else ExitCode.PASS


def _shortfall_dict(shortfall: busbw_module.Shortfall) -> dict[str, str]:
    """Return plain data with the keys of the JSON output."""
    return {"where": shortfall.where, "found": shortfall.observed, "wanted": shortfall.expected}


def _show(session: Session, result: preflight_module.Preflight) -> None:
    with_finding, incomplete = ({item.check for item in items} for items in (result.findings, result.unchecked))
    skipped = [name for name in dict.fromkeys(part.check for part in result.unchecked) if name not in result.checked]
    marks = [(_mark(name, with_finding, incomplete), name) for name in result.checked]
    session.table(("", "check"), [*marks, *((styled("not checked", "yellow"), name) for name in skipped)])
    _show_findings(session, result.findings)
    if result.burnin is not None:
        _show_goodput(session, result.burnin)
    _show_unchecked(session, result)
    for exclusion in result.leave_out:
        session.out.print(Text.assemble("leave out ", (exclusion.host, "bold"), f": {exclusion.why}"), soft_wrap=True)
    unchecked = f", {len(skipped)} not checked" if skipped else ""
    session.out.print(
        f"{result.lab}: {len(result.findings) or 'nothing'} wrong in {len(result.checked)} checks{unchecked}"
    )


def _show_findings(session: Session, findings: Sequence[PreflightFinding]) -> None:
    if not findings:
        return
    rows = [(finding.check, finding.where, finding.observed, finding.expected) for finding in findings]
    session.table(("check", "where", "found", "expected"), rows)
    for name, do in dict.fromkeys((finding.check, finding.do) for finding in findings):
        session.out.print(Text.assemble("  ", (name, "bold"), f": {do}"), soft_wrap=True)


def _show_goodput(session: Session, burnin: Burnin) -> None:
    """Print the range of goodput of each kind of pair."""
    for kind in dict.fromkeys(pair.kind for pair in burnin.pairs):
        pairs = [pair for pair in burnin.pairs if pair.kind == kind]
        rates = sorted(pair.goodput_bps for pair in pairs if pair.goodput_bps is not None)
        if rates:
            goodput = f"{rates[0] / 1e9:.3f} to {rates[-1] / 1e9:.3f} Gb/s"
            session.out.print(f"{kind}: {len(pairs)} pairs, goodput {goodput}")


def _mark(name: str, with_finding: set[str], incomplete: set[str]) -> Text:
    """Return the result of a check: wrong, partly checked, or right."""
    if name in with_finding:
        return styled("wrong", "red")
    return styled("partly checked", "yellow") if name in incomplete else styled("right", "green")


def _show_unchecked(session: Session, result: preflight_module.Preflight) -> None:
    """Print each reason once, with the first place that it applies to and the number of the others."""
    places: dict[tuple[str, str], list[str]] = {}
    for part in result.unchecked:
        places.setdefault((part.check, part.why), []).append(part.where)
    rows = [(check, first_of(where, 1), why) for (check, why), where in places.items()]
    if rows:
        session.table(("not checked", "where", "why"), rows)


@click.command("support-bundle")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("faultbed-support.tar.gz"),
    show_default=True,
    help="The file to write.",
)
@pass_session
def support_bundle(session: Session, *, out: Path) -> None:
    """Collect the output of the lab's tools into one file to send. Changes nothing.

    Addresses, MACs, serial numbers and UUIDs are replaced, and lines that name a password or a key are left out. Review
    the file before you send it. Not yet run on hardware.
    """
    with open_lab(session.inventory()) as lab:
        texts = support_bundle_module.gather(lab)
    support_bundle_module.write(out, texts)
    session.out.print(f"{out}: the output of {len(texts)} machines; review it before you send it", soft_wrap=True)


COMMANDS = (preflight, support_bundle)
