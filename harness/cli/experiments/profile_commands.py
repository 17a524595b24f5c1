"""`faultbed profile`: print a fault schedule."""

from __future__ import annotations

from dataclasses import replace

import click

from faultbed.harness.cli.context import Session, json_option, pass_session
from faultbed.harness.cli.options.numbers import parse_duration
from faultbed.harness.experiment import toml_text
from faultbed.harness.run.prepare import exclusions
from faultbed.inject.fault_plan import plan_all
from faultbed.inject.kinds.catalogue import kind_named
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.profiles import PROFILES, as_plain, digest, schedule
from faultbed.testbed.inventory.subset import without_hosts

__all__ = ["COMMANDS"]


@click.command()
@click.argument("name", required=False)
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Seed of all random choices.")
@click.option("--for", "duration", default="60s", show_default=True, metavar="TIME", help="Length of the schedule.")
@click.option("--events", type=click.IntRange(min=1), help="Expected number of faults; default: the profile's.")
@click.option("--after", default="0s", show_default=True, metavar="TIME", help="Fault-free time at the start.")
@click.option("--without", multiple=True, metavar="HOST", help="Plan no fault on this host or its links. Repeatable.")
@json_option
@pass_session
def profile(
    session: Session,
    *,
    name: str | None,
    seed: int,
    duration: str,
    events: int | None,
    after: str,
    without: tuple[str, ...],
    as_json: bool,
) -> None:
    """Print a random fault schedule with published failure rates, as `[[faults]]` of an experiment. Touches no lab.

    Without a NAME, lists the profiles. The same seed gives the same schedule, with the same SHA-256.
    """
    if name is None:
        _list_profiles(session)
        return
    inventory = session.inventory()
    inventory = without_hosts(inventory, [exclusion.host for exclusion in exclusions.named_by_user(inventory, without)])
    after_s = parse_duration(after)
    specs = schedule(name, inventory.topology, seed=seed, duration_s=parse_duration(duration), events=events)
    specs = tuple(replace(spec, at_s=spec.at_s + after_s) for spec in specs)
    plan_all(specs, inventory.topology, lab_kind=inventory.kind)
    sha256 = digest(specs)
    if as_json:
        faults = [as_plain(spec) for spec in specs]
        session.json({"profile": name, "seed": seed, "sha256": sha256, "faults": faults})
        return
    click.echo(f"# {name}, seed {seed}, {duration}, {len(specs)} faults on {inventory.name}; SHA-256 {sha256}")
    for spec in specs:
        click.echo(_toml_of(spec))


def _list_profiles(session: Session) -> None:
    rows = [(known.name, str(known.events), known.summary) for known in PROFILES.values()]
    session.table(("profile", "events", "what it models"), rows)


def _toml_of(spec: FaultSpec) -> str:
    lines = [
        "",
        "[[faults]]",
        *toml_text.lines({"kind": spec.kind, "target": spec.target}),
        *toml_text.lines({"at": f"{spec.at_s:.3f}s", "for": f"{spec.for_s:.3f}s"}),
        *toml_text.lines({"set": kind_named(spec.kind).spelled(spec.params)} if spec.params else {}),
    ]
    return "\n".join(lines)


COMMANDS = (profile,)
