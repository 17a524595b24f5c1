"""Commands that start, inspect and stop the lab, and open shells on its machines."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.text import Text

from faultbed.harness.cli.context import Session, json_option, pass_session, styled
from faultbed.harness.cli.lab.sharing import entries_of, show_entries, to_json
from faultbed.harness.verdict import ExitCode
from faultbed.testbed import doctor as doctor_module
from faultbed.testbed.backends.lab_backend import backend_of
from faultbed.testbed.backends.rack import rack_status
from faultbed.testbed.backends.soft import lifecycle
from faultbed.testbed.directories import lab_dir
from faultbed.testbed.errors import LabError
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.lab import open_lab
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.tenancy import dirty
from faultbed.testbed.tenancy.lab_lease import hold, hold_if_recorded
from faultbed.testbed.tenancy.reservation import Entry, ReservationLost

__all__ = ["COMMANDS", "ssh_arguments"]


@click.command()
@json_option
@pass_session
def doctor(session: Session, *, as_json: bool) -> int:
    """Check the prerequisites: tools, memory, disk, KVM, and the lab's own state. Changes nothing."""
    findings = doctor_module.examine(session.inventory())
    if as_json:
        session.json([dataclasses.asdict(finding) for finding in findings])
    else:
        colours = {"ok": "green", "note": "yellow", "bad": "red"}
        rows = [(styled(x.state, colours[x.state]), x.what, x.found) for x in findings]
        session.table(("", "what", "found"), rows)
        for finding in findings:
            if finding.advice:
                session.out.print(Text.assemble("  ", (finding.what, "bold"), f": {finding.advice}"))
    return ExitCode.ERROR if any(finding.state == "bad" for finding in findings) else ExitCode.PASS


@click.command()
@click.option("--fresh", is_flag=True, help="Boot and provision from nothing, even if there is a snapshot.")
@pass_session
def up(session: Session, *, fresh: bool) -> None:
    """Bring the soft lab up: boot, provision, verify and snapshot it, or resume from its snapshot in seconds.

    The first time also builds the VM image from Debian packages. Ctrl-C ends everything that was started.
    """
    inventory = session.inventory()
    backend = backend_of(inventory.kind)
    backend.check_can_start(inventory)
    # Also where the lab is up: an `up` with another image or other playbooks ends what runs.
    with (
        hold(inventory, why="up", mode="exclusive") as holding,
        session.progress(also=holding.heartbeat) as progress,
    ):
        started = backend.up(inventory, progress, fresh=fresh)
    session.err.print(Text.assemble((inventory.name, "green"), f" is up ({started}): `faultbed status` shows it"))


@click.command()
@json_option
@pass_session
def status(session: Session, *, as_json: bool) -> int:
    """Show the current state of the lab. Exits with 0 if it is up, with 3 if it is down or broken.

    Soft lab: its VMs, and whether each has a warm parent, a process that has imported the node code and starts programs
    quickly as forks (not queried while a command uses the lab). Rack lab: which machines answer SSH and have a pinned
    host key, without a login. Both: reservations and their owners, and the reason if the lab is DIRTY.
    """
    inventory = session.inventory()
    if not traits_of(inventory.kind).is_emulated:
        return _rack_status(session, inventory, as_json=as_json)
    with session.progress() as progress:
        now = lifecycle.patient_status(inventory, progress)
    entries, now_s = entries_of(inventory)
    # A connection costs an emulated machine as much as ten commands: none while a command may be measuring.
    warm = lifecycle.warm_parents(inventory) if now.state == "up" and not entries else {}
    marked, unfinished = (look(lab_dir(inventory.name)) for look in (dirty.reasons, dirty.unfinished))
    if as_json:
        marks = {
            "dirty": marked,
            "unfinished": unfinished,
            "reservations": [to_json(entry, now_s) for entry in entries],
        }
        known = dataclasses.asdict(now)
        known["vms"] = [{**each, "warm_parent": warm.get(each["name"])} for each in known["vms"]]
        session.json({**known, **marks})
    else:
        words = (
            f": {now.state}"
            + (f", {now.accelerator}" if now.accelerator else "")
            + (", snapshot" if now.snapshot else "")
            + f"; {_size(inventory.topology)}"
        )
        session.out.print(Text.assemble((now.name, "bold"), words))
        rows = [
            (
                x.name,
                "alive" if x.alive else "dead",
                "answers" if x.ssh else "silent",
                f"127.0.0.1:{x.ssh_port or '-'}",
                _start_of_programs(warm, x.name),
            )
            for x in now.vms
            if x.pid is not None
        ]
        if rows:
            session.table(("VM", "process", "SSH", "at", "programs start"), rows)
        for sentence in lifecycle.panics(inventory):
            session.out.print(styled(sentence, "red"))
        _show_dirty(session, marked, unfinished)
        show_entries(session, entries, now_s)
    return ExitCode.PASS if now.state == "up" else ExitCode.ERROR


def _rack_status(session: Session, inventory: Inventory, *, as_json: bool) -> int:
    now = rack_status.status(inventory)
    unread: str | None = None
    entries: tuple[Entry, ...] = ()
    now_s = 0.0
    try:
        entries, now_s = entries_of(inventory)
    except LabError as error:  # print the rest of the state nevertheless
        unread = str(error)
    if as_json:
        reservations = None if unread else [to_json(entry, now_s) for entry in entries]
        session.json({**dataclasses.asdict(now), "reservations": reservations, "reservations_unread": unread})
    else:
        words = f": {now.state}; {_size(inventory.topology)}"
        session.out.print(Text.assemble((now.name, "bold"), words), soft_wrap=True)
        rows = [(x.name, x.role, "answers" if x.ssh else "silent", x.at, x.why or "") for x in now.machines]
        session.table(("machine", "is a", "SSH", "at", "problem"), rows)
        _show_dirty(session, now.dirty, now.unfinished)
        if unread:
            session.out.print(Text.assemble(("reservations are not known", "red"), f": {unread}"), soft_wrap=True)
        show_entries(session, entries, now_s)
    return ExitCode.PASS if now.state == "up" and unread is None else ExitCode.ERROR


def _start_of_programs(warm: Mapping[str, Mapping[str, Any] | None], name: str) -> str:
    """Return how node programs start on a VM: `warm`, with the memory of the process that forks them; `cold`; `?`."""
    if name not in warm:
        return "?"
    parent = warm[name]
    return "cold" if parent is None else f"warm ({parent['rss_kib'] / 1024:.0f} MiB)"


def _size(topology: Topology) -> str:
    return (
        f"{len(topology.racks)} racks, {len(topology.hosts)} hosts, {sum(len(host.rnics) for host in topology.hosts)} "
        f"RNICs, {len(topology.switches)} switches, {len(topology.uplinks)} uplinks"
    )


def _show_dirty(session: Session, reasons: tuple[str, ...], unfinished: tuple[str, ...] = ()) -> None:
    if reasons:
        words = ": it refuses work until `faultbed heal` has reverted this:"
        session.out.print(Text.assemble(("DIRTY", "red"), words))
    for reason in reasons:
        session.out.print(f"  {reason}", soft_wrap=True)
    for sentence in unfinished:
        session.out.print(sentence, soft_wrap=True)


@click.command()
@pass_session
def reset(session: Session) -> None:
    """Restore the running lab's snapshot within seconds, so that every test starts from the same state."""
    inventory = session.inventory()
    backend = backend_of(inventory.kind)
    backend.check_can_start(inventory)
    with hold(inventory, why="reset", mode="exclusive"), session.progress() as progress:
        backend.reset(inventory, progress)


@click.command()
@click.option(
    "--purge",
    is_flag=True,
    help="Remove the whole folder of the lab: its snapshot (the next up boots and provisions), its audit log, the "
    "journals of its faults and its reservations. The folder is printed.",
)
@pass_session
def down(session: Session, *, purge: bool) -> None:
    """End the lab and remove its processes and sockets. Its snapshot stays, for the next `up`, and its audit log."""
    inventory = session.inventory()
    backend = backend_of(inventory.kind)
    backend.check_can_start(inventory)
    # A purge removes the reservations with the lab's folder: there is none to release.
    gone = (ReservationLost,) if purge else ()
    with contextlib.suppress(*gone), hold_if_recorded(inventory, why="down"):
        was_up = backend.down(inventory)
        if purge:
            kept = _kept_records(lab_dir(inventory.name))
            if kept:
                session.err.print(f"removing {lab_dir(inventory.name)} with {kept}", soft_wrap=True)
            backend.purge(inventory)
    session.err.print(f"{inventory.name} {'is down' if was_up else 'was not up'}")


def _kept_records(folder: Path) -> str:
    """Return what a purge of a lab's folder deletes besides the files of its VMs; empty if there is no folder."""
    if not folder.is_dir():
        return ""
    records = {
        "its snapshot": folder / "snapshot.json",
        "its audit log": folder / "audit.jsonl",
        "the journals of its faults": folder / "journal",
    }
    return ", ".join(name for name, path in records.items() if path.exists()) or "its files"


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("node")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@pass_session
def ssh(session: Session, node: str, command: tuple[str, ...]) -> NoReturn:
    """Log in to NODE, or run a COMMAND there (`faultbed ssh host1 -- rdma link`); a pipe needs `-- sh -c "..."`.

    A switch of a soft lab is a namespace: `faultbed ssh rtsw1 -- ip route` runs inside it.
    """
    inventory = session.inventory()
    with open_lab(inventory) as lab:
        argv = backend_of(inventory.kind).ssh_command(inventory, lab.carrier(node).name)
        netns = lab.netns(node)
    terminal = ["-t"] if not command and sys.stdin.isatty() else []
    argv = [*argv, *terminal, "127.0.0.1", *ssh_arguments(command, netns)]
    try:
        os.execvp(argv[0], argv)  # noqa: S606 (no shell is the point)
    except FileNotFoundError as error:
        raise LabError("ssh not found: `apt-get install openssh-client` installs it") from error


def ssh_arguments(command: tuple[str, ...], netns: str | None) -> list[str]:
    """Return the command for ssh: no argument, or a single one.

    ssh joins its arguments with spaces, and the remote shell splits them again (ssh(1)): `-c "show bgp summary"` would
    arrive as three words, and a command after a `;` would run outside the namespace.
    """
    if netns is None:
        return [shlex.join(command)] if command else []
    return [shlex.join(["ip", "netns", "exec", netns, *(command or ("bash", "-l"))])]


COMMANDS = (doctor, up, status, reset, down, ssh)
