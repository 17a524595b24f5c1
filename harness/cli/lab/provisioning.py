"""The command provision: configure a rack's machines as the inventory says, or restore their original state."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import click

from faultbed.harness.cli.context import Session, json_option, pass_session
from faultbed.inject.policy.safety import Forbidden, policy_of
from faultbed.testbed import provision as provision_module
from faultbed.testbed.errors import ConfigError, FaultbedError, HalfProvisioned, UsageError
from faultbed.testbed.inventory.ansible_listing import listing
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.inventory.rules.role_variables import misspelt
from faultbed.testbed.inventory.schema import near
from faultbed.testbed.lab import Lab, open_lab
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.testbed.provision import Event, OnEvent, ProvisionResult
from faultbed.testbed.tenancy import audit_log, dirty
from faultbed.testbed.tenancy.lab_lease import hold

__all__ = ["COMMANDS", "allow", "machines_of", "playbook_of"]

_PROVISION = "provision"
"""Beginning of the names of these commands in the mark that an interrupted command leaves."""


@click.command()
@click.argument("machines", nargs=-1, metavar="[MACHINE]...")
@click.option("--check", is_flag=True, help="Print what would be changed, and change nothing.")
@click.option("--tags", metavar="ROLE[,ROLE]...", default="", help="Only these roles of playbooks/rack.yml.")
@click.option("--teardown", is_flag=True, help="Restore the settings from before provisioning.")
@json_option
@pass_session
def provision(
    session: Session, *, machines: tuple[str, ...], check: bool, tags: str, teardown: bool, as_json: bool
) -> None:
    """Configure a rack's MACHINEs (hosts and switches; default: all) as in the inventory, by Ansible.

    Each machine keeps a record of its earlier settings, which --teardown restores. The machines are reserved meanwhile,
    and faultbed_safety.may_disrupt must name them (--check needs only the reservation). `faultbed audit` lists the
    change. A soft lab is provisioned by `faultbed up`; this command can only check it. Not yet run on hardware.
    """
    inventory = session.inventory()
    roles = tuple(word.strip() for word in tags.split(",") if word.strip())
    playbook = playbook_of(inventory, check=check, roles=roles, teardown=teardown)
    names = machines_of(inventory, machines)
    if playbook == "rack":
        _require_known_variables(inventory)
    if not check:
        allow(inventory, names)
    why = f"{'teardown' if teardown else 'provision'}{' --check' if check else ''}"
    reserved = () if traits_of(inventory.kind).has_snapshot else machines
    with (
        open_lab(inventory) as lab,
        hold(inventory, reserved, why=why, mode="shared" if check else "exclusive") as holding,
        session.progress(also=holding.heartbeat) as progress,
    ):

        def report(event: Event) -> None:
            if event.state not in {"started", "skipped"}:
                progress(f"{event.node}: {event.task}: {event.state}")

        if check:
            site = provision_module.site_of(lab)
            done = provision_module.play(site, playbook, check=True, tags=roles, machines=machines, on_event=report)
        else:
            # This command repeats or reverts an interrupted provisioning, so its mark does not keep it from running.
            if not dirty.left_by(lab.state_dir).startswith(_PROVISION):
                dirty.admit(lab, progress)
            done = _play(lab, playbook, machines, roles, report)
    _show(session, inventory, done, check=check, as_json=as_json)


def playbook_of(inventory: Inventory, *, check: bool, roles: Sequence[str], teardown: bool) -> str:
    """Return the playbook for these options.

    Raises:
        UsageError: the options are not for this kind of lab, or there is no such role.
    """
    if traits_of(inventory.kind).has_snapshot:
        if teardown or roles or not check:
            raise UsageError(
                f"{inventory.name} is a soft lab: `faultbed up` provisions it (`up --fresh` from nothing), `reset` and "
                "`down` revert that; use `provision --check` to list what would be changed"
            )
        return "provision"
    if teardown:
        if roles:
            raise UsageError("--teardown restores the settings from before every role; leave out --tags")
        return "rack-teardown"
    known = provision_module.roles_of("rack")
    for role in roles:
        if role not in known:
            raise UsageError(f'--tags {role}: no role "{role}" in playbooks/rack.yml{near(role, list(known))}')
    return "rack"


def _require_known_variables(inventory: Inventory) -> None:
    """Reject misspelt variables of roles, which Ansible would ignore.

    Raises:
        ConfigError: with each name and the nearest known one.
    """
    hostvars = listing(inventory.path)["_meta"]["hostvars"]
    if wrong := [f"{finding.place}: {finding.what}; {finding.do}" for finding in misspelt(hostvars)]:
        raise ConfigError(f"{inventory.path}: {'; '.join(wrong)}")


def machines_of(inventory: Inventory, names: Sequence[str]) -> tuple[str, ...]:
    """Return the named machines, or all machines if none is named.

    Raises:
        UsageError: there is no such machine.
    """
    for name in names:
        if name not in inventory.machines:
            raise UsageError(f'no machine "{name}" in {inventory.name}{near(name, list(inventory.machines))}')
    return tuple(names) or inventory.machines


def allow(inventory: Inventory, names: Sequence[str]) -> None:
    """Reject machines that the lab's owner does not allow to be disrupted: roles set links, QoS and routes.

    Raises:
        Forbidden: with the machines, and what to do.
    """
    patterns = policy_of(inventory).may_disrupt
    beyond = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns)]
    if beyond:
        raise Forbidden(
            f"provision: {inventory.name} does not allow {', '.join(beyond)} to be disrupted; name those that it does "
            f"(faultbed_safety.may_disrupt: {', '.join(patterns) or 'nothing'}), or ask its owner to add these"
        )


def _play(lab: Lab, playbook: str, machines: Sequence[str], roles: Sequence[str], on_event: OnEvent) -> ProvisionResult:
    """Run the playbook, with a line in the audit log before and after."""
    subject = {"kind": " ".join([playbook, *roles]), "target": " ".join(machines) or "all machines"}
    revert = [] if playbook == "rack-teardown" else [f"faultbed provision --teardown {' '.join(machines)}".strip()]
    audit_log.append(lab.state_dir, "provisioning", **subject, revert=revert)
    try:
        with dirty.changing(lab.state_dir, _command(playbook), leaves_unknown=(HalfProvisioned,)):
            done = provision_module.play(
                provision_module.site_of(lab), playbook, tags=roles, machines=machines, on_event=on_event
            )
    except FaultbedError as error:
        audit_log.append(lab.state_dir, "provisioning failed", **subject, detail=str(error))
        raise
    audit_log.append(lab.state_dir, "provisioned", **subject, detail=f"{sum(done.changed.values())} tasks made changes")
    return done


def _command(playbook: str) -> str:
    return f"{_PROVISION}{' --teardown' if playbook == 'rack-teardown' else ''}"


def _show(session: Session, inventory: Inventory, done: ProvisionResult, *, check: bool, as_json: bool) -> None:
    changed = {name: count for name, count in done.changed.items() if count}
    if as_json:
        session.json(
            {
                "lab": inventory.name,
                "check": check,
                "changed_tasks": changed,
                "changes": done.changes,
                "notes": done.notes,
                "seconds": done.seconds,
            }
        )
        return
    rows = [(name, change) for name, changes in sorted(done.changes.items()) for change in changes]
    # A task that is Ansible's own module does not say what it changed.
    rows += [(name, f"{count} tasks") for name, count in sorted(changed.items()) if name not in done.changes]
    if rows:
        session.table(("machine", "would be changed" if check else "changed"), rows)
    notes = [(name, note) for name, notes in sorted(done.notes.items()) for note in notes]
    if notes:
        session.table(("machine", "note"), notes)
    verb = "would change" if check else "changed"
    session.out.print(f"{inventory.name}: {len(changed) or 'no'} machines {verb}, {done.seconds:.0f} s", soft_wrap=True)


COMMANDS = (provision,)
