"""Commands about faults: faults, inject, heal."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import secrets
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import click
from rich.text import Text

from faultbed.harness.cli.context import Session, json_option, pass_session, styled
from faultbed.harness.cli.options.numbers import parse_duration
from faultbed.harness.error_words import describe
from faultbed.harness.run import ends
from faultbed.harness.verdict import ExitCode
from faultbed.inject import capability, fault_page
from faultbed.inject.evidence.exposure import why_not_exposed
from faultbed.inject.evidence.receipt import Fired, Receipt
from faultbed.inject.evidence.use_by_others import use_by_others
from faultbed.inject.fault_plan import plan as plan_fault
from faultbed.inject.heal import heal as heal_lab
from faultbed.inject.heal import is_foreign
from faultbed.inject.injector import Injector, audit_fields, longest_lease_s
from faultbed.inject.journal import Journal
from faultbed.inject.kinds import catalogue
from faultbed.inject.kinds.fault_spec import Exposed, FaultSpec
from faultbed.inject.mechanisms.mechanism import Witness
from faultbed.inject.mechanisms.planned_fault import PlannedFault
from faultbed.inject.mechanisms.rack.rack_mechanism import typed_command
from faultbed.inject.param_units import why_no_quantity
from faultbed.inject.policy import blast_radius, safety
from faultbed.inject.policy.conflicts import touches
from faultbed.inject.prepared_fault import PreparedFault
from faultbed.inject.selection import MOST_SEED
from faultbed.testbed.directories import lab_dir
from faultbed.testbed.errors import FaultError, Unreachable, UsageError
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.lab import Lab, open_lab
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.suggestions import hint
from faultbed.testbed.tenancy import audit_log, dirty
from faultbed.testbed.tenancy.lab_lease import hold_if_recorded

__all__ = ["COMMANDS"]

OBSERVE_S = 0.5
MOST_COUNTERS = 6
"""How many counters of one witness a plan prints: an event that any RNIC of a rack shows has more than a hundred."""


@click.command()
@click.argument("kind", required=False)
@click.option("--here", is_flag=True, help="Query which faults the machines can apply and revert. Changes nothing.")
@json_option
@pass_session
def faults(session: Session, *, kind: str | None, here: bool, as_json: bool) -> None:
    """List the kinds of faults; with a KIND (or its beginning), show its parameters and how it is proved.

    --here lists for each target of this lab which kinds are possible, and why others are not; on a rack by the release,
    ASIC, firmware and tools of its machines.
    """
    kinds = list(catalogue.CATALOGUE.values())
    if kind is not None:
        kinds = [known for known in kinds if known.name.startswith(kind)] or [catalogue.kind_named(kind)]
    if here:
        with open_lab(session.inventory()) as lab:
            answers = capability.query_capabilities(lab, kinds)
        if as_json:
            session.json([dataclasses.asdict(answer) for answer in answers])
        else:
            session.table(("kind", "here", "targets", "why"), capability.summary(answers))
        return
    if as_json:
        session.json([_kind_as_json(known) for known in kinds])
        return
    if kind is None:
        session.table(("kind", "targets", "fidelity", "reverted by", "what it does"), fault_page.table())
        session.out.print("`faultbed faults KIND` shows the parameters and the proof of a kind")
        return
    for known in kinds:
        _show_kind(session, known)


@click.command()
@click.argument("kind")
@click.argument("target")
@click.option("--for", "duration", required=True, metavar="TIME", help="Duration: 500ms, 5s, 2m.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A parameter of the kind; repeatable.")
@click.option("--qp", help="packet.drop: the destination QP (short for --set qp=…).")
@click.option("--psn", help="packet.drop: the PSN, absolute, or +N ahead of the current one (short for --set psn=…).")
@click.option(
    "--seed",
    type=click.IntRange(0, MOST_SEED),
    help="Seed that selects the packets to hit. Default: random, and printed.",
)
@click.option(
    "--exposed",
    type=click.Choice(get_args(Exposed)),
    help="What the fault must act on: something that running workloads use, or nothing that they use. Default: "
    "workload if a queue pair is connected when the fault is armed; otherwise not judged.",
)
@click.option("--plan", "only_plan", is_flag=True, help="Print every command and its revert, and do nothing.")
@click.option(
    "--journal", type=click.Path(dir_okay=False, path_type=Path), help="Journal of intents, written before each change."
)
@click.option("--confirm", metavar="KIND", help="Repeat KIND to confirm a fault that is irreversible or may spread.")
@json_option
@pass_session
def inject(
    session: Session,
    *,
    kind: str,
    target: str,
    duration: str,
    settings: tuple[str, ...],
    qp: str | None,
    psn: str | None,
    seed: int | None,
    exposed: Exposed | None,
    only_plan: bool,
    confirm: str | None,
    journal: Path | None,
    as_json: bool,
) -> int:
    """Inject one fault, and show its receipt: armed, fired, cleared.

    KIND is one of `faultbed faults`; TARGET is named as in `faultbed status`: rtsw1:ctsw1 (an uplink),
    rtsw1:host1:rxe0 (a switch port), host1:rxe0 (an RNIC), host1:gpu0; or by a selector that fits any lab: uplink[0],
    host[1]:gpu[0]; used-uplink[0] is an uplink that queue pairs cross when the fault is armed, and
    path[host1:rxe0>host3:rxe0] the place on the path between two RNICs. The target reverts by itself if this command
    dies. Exits with 0 if the fault provably fired, and beside traffic on something that it used; with 2 if not, and
    with 5 if the lab has changed.
    """
    inventory = session.inventory()
    params = _params([*settings, *([f"qp={qp}"] if qp else []), *([f"psn={psn}"] if psn else [])])
    for name, value in params.items():
        if wrong := why_no_quantity(kind, name, value):
            raise UsageError(f"--set {name}: {wrong}")
    seed = secrets.randbelow(MOST_SEED + 1) if seed is None else seed
    spec = FaultSpec(kind=kind, target=target, for_s=parse_duration(duration), params=params, seed=seed)
    planned = plan_fault(spec, inventory.topology, lab_kind=inventory.kind)
    confirmed = (confirm,) if confirm else ()
    if only_plan:
        _show_plan(session, planned, as_json=as_json)
        _report_policy(session, planned, inventory, confirmed)
        return ExitCode.PASS
    try:
        _refuse(planned, inventory, confirmed)
    except safety.Forbidden as reason:
        audit_log.append(lab_dir(inventory.name), "forbidden", **audit_fields(planned), detail=str(reason))
        raise
    why = f"inject {kind} {target}"
    with session.working(inventory, touches(planned, inventory.topology), why=why) as lab:
        work = dirty.begin(lab, why, lease_s=longest_lease_s([planned]))
        injector = None
        try:
            path = journal or _journal_of(lab, kind)
            with Journal(path) as opened_journal:
                if broken := opened_journal.broken:
                    session.err.print(
                        f"{path}: {len(broken)} lines are no records, the first is line {broken[0]}: a command was "
                        "killed while it wrote it; they are kept, and new records are appended",
                        soft_wrap=True,
                    )
                injector = Injector(lab, opened_journal, confirmed=confirmed)
                injector.use_of = functools.partial(use_by_others, lab)
                receipt = _inject(session, lab, injector, planned)
            outcome = ends.finish(lab, work, injector)
        except BaseException as error:  # noqa: BLE001 (raised again with what was seen)
            ends.reraise(error, lab, work, injector)
        if opened_journal.failure is not None:
            session.err.print(f"{path}: {describe(opened_journal.failure)}; the journal is incomplete", soft_wrap=True)
    judged = exposed or ("workload" if receipt.exposed.uses else None)
    unproven = (*receipt.unproven, *_why_not_exposed(receipt, planned, inventory.topology, judged))
    _show_receipt(session, receipt, unproven, outcome, as_json=as_json)
    if judged is None and not as_json:
        session.out.print(
            "exposure is not judged: no queue pair was connected when the fault was armed", soft_wrap=True
        )
    if outcome.state == "DIRTY":
        return ExitCode.DIRTY
    return ExitCode.INCONCLUSIVE if unproven else ExitCode.PASS


@click.command()
@click.argument("machines", nargs=-1, metavar="[MACHINE]...")
@click.option("--panic", is_flag=True, help="Only end faults, on all machines at once, within seconds.")
@json_option
@pass_session
def heal(session: Session, *, machines: tuple[str, ...], panic: bool, as_json: bool) -> int:
    """Find what faults left on the machines of the lab, without any journal, and revert it.

    MACHINEs limit this to a part of a rack, while other users work on the rest. A DIRTY lab is then compared with its
    state before: the command exits with 0 and the lab accepts work again if they are equal, and with 5 if something is
    left.
    """
    inventory = session.inventory()
    _only_machines(inventory, machines)
    # Panic ignores reservations: it also removes the faults of other sessions.
    holding = contextlib.nullcontext() if panic else hold_if_recorded(inventory, machines, why="heal")
    state, subject = lab_dir(inventory.name), {"kind": "panic" if panic else "", "target": " ".join(machines) or "all"}
    with open_lab(inventory) as lab, holding:
        audit_log.try_to_append(state, "healing", **subject)  # a full disk must not keep a fault in place
        try:
            with contextlib.ExitStack() as marked:
                with contextlib.suppress(OSError):  # a full disk must not keep a fault in place
                    marked.enter_context(dirty.changing(state, "heal"))
                done = heal_lab(lab, only=machines, panic=panic)
            left = [] if panic else dirty.settle(lab)
        except BaseException as error:
            audit_log.try_to_append(state, "not healed", **subject, detail=audit_log.error_text(error))
            raise
        audit_log.try_to_append(state, "not healed" if left else "healed", **subject, detail="; ".join([*done, *left]))
    if as_json:
        session.json({"done": done, "left": left})
    else:
        _show_healed(session, done, left)
    return ExitCode.DIRTY if left else ExitCode.PASS


def _only_machines(inventory: Inventory, names: tuple[str, ...]) -> None:
    if names and traits_of(inventory.kind).has_snapshot:
        raise UsageError(f"{inventory.name} is a soft lab: it is healed as a whole")
    for name in names:
        if name not in inventory.machines:
            raise UsageError(f'no machine "{name}" in {inventory.name}; {hint(name, list(inventory.machines))}')


def _show_healed(session: Session, done: list[str], left: list[str]) -> None:
    for line in done:
        session.out.print(line, soft_wrap=True)
    reverted = sum(not is_foreign(line) for line in done)
    session.out.print("nothing to heal" if not reverted else f"{reverted} reverted")
    if left:
        remedy = " still; on a soft lab `faultbed reset` goes back to the snapshot"
        session.out.print(Text.assemble(("DIRTY", "red"), remedy))
        for line in left:
            session.out.print(f"  {line}", soft_wrap=True)


def _show_kind(session: Session, kind: catalogue.FaultKind) -> None:
    session.out.print(Text.assemble((kind.name, "bold"), f"  {kind.summary}"))
    session.out.print(f"  targets: {', '.join(kind.targets)}; {kind.fidelity_text}", soft_wrap=True)
    session.out.print(f"  armed when: {kind.armed_by}", soft_wrap=True)
    if kind.on_rack:
        session.out.print(f"  on a rack lab (not yet run on hardware): {kind.on_rack}", soft_wrap=True)
    session.out.print(f"  fired when this moves: {kind.must_move}", soft_wrap=True)
    session.out.print(f"  and this does not: {kind.must_not_move}", soft_wrap=True)
    rows = [
        (
            f"    {param.name}",
            f"{param.range} {param.unit}".strip(),
            "required" if param.required else ("" if param.default is None else f"default {param.default}"),
            param.summary,
        )
        for param in kind.params
    ]
    session.table(("    --set", "range", "", "meaning"), rows)
    session.out.print(f"  {kind.command}", soft_wrap=True)
    session.out.print()


def _refuse(planned: PlannedFault, inventory: Inventory, confirmed: tuple[str, ...]) -> None:
    safety.check(planned, inventory, confirmed=confirmed)
    blast_radius.check([planned], inventory)


def _report_policy(session: Session, planned: PlannedFault, inventory: Inventory, confirmed: tuple[str, ...]) -> None:
    """Report on stderr whether the lab's policy forbids the fault. stdout keeps the plan, which may be JSON."""
    try:
        _refuse(planned, inventory, confirmed)
    except safety.Forbidden as reason:
        session.err.print(f"would be refused: {reason}", soft_wrap=True)


def _inject(session: Session, lab: Lab, injector: Injector, planned: PlannedFault) -> Receipt:
    with session.progress() as progress, injector:
        progress(f"preparing {planned.kind} on {planned.target.text}")
        prepared = injector.prepare(planned)
        try:
            armed = prepared.arm()
            progress(f"armed: {_short(armed.readback)}")
            _watch(lab, prepared, planned.spec.for_s, progress)
        except (FaultError, Unreachable) as error:
            progress(f"failed: {error}")
        progress("clearing")
        return prepared.clear()


def _why_not_exposed(
    receipt: Receipt, planned: PlannedFault, topology: Topology, expected: Exposed | None
) -> tuple[str, ...]:
    """Return why the fault is not shown to have acted where it should; empty if it is, or if that is not judged."""
    if expected is None:
        return ()
    return why_not_exposed(receipt, dataclasses.replace(planned.spec, exposed=expected), topology)


def _watch(lab: Lab, prepared: PreparedFault, for_s: float, progress: Any) -> None:
    deadline = time.monotonic() + for_s
    last = None
    while (left_s := deadline - time.monotonic()) > 0:
        threading.Event().wait(min(OBSERVE_S, left_s))
        count = prepared.observe().count
        lab.guard()
        if count != last:
            last = count
            progress(f"fired so far: {last}")


def _journal_of(lab: Lab, kind: str) -> Path:
    """Return the path of a new journal. It has a random part, because two commands may begin in the same second."""
    began = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    return lab.state_dir / "journal" / f"{began}-{kind}-{secrets.token_hex(3)}.jsonl"


def _params(settings: list[str]) -> dict[str, Any]:
    params = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise UsageError(f'--set {setting}: write NAME=VALUE, such as "share=0.01"')
        params[name] = _value(value)
    return params


def _value(text: str) -> Any:
    if text.startswith("+"):
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _show_plan(session: Session, planned: PlannedFault, *, as_json: bool) -> None:
    if as_json:
        session.json(planned.to_json())
        return
    session.out.print(
        Text.assemble(
            (planned.kind, "bold"),
            f" on {planned.target.text} for {planned.spec.for_s:g} s ({planned.fidelity}); nothing is done yet",
        )
    )
    session.table(("do", "revert"), _steps_of(planned))
    if planned.mechanism.selection is not None:
        session.out.print(f"its packets are {planned.mechanism.selection}", soft_wrap=True)
    for line in _checks_and_readbacks(planned):
        session.out.print(line, soft_wrap=True)
    if not traits_of(planned.lab_kind).is_emulated:
        unit = "a transient unit (systemd-run) with the revert stored in /run/faultbed/faults first"
        session.out.print(f"held on {planned.place.node} by {unit}; not yet run on hardware", soft_wrap=True)
    moves = " and ".join(_any_of(witness) for witness in planned.mechanism.must_move)
    reads = " and ".join(f"{name} reads {value}" for name, value in planned.mechanism.while_on)
    proofs = [f"this moves: {moves}"] * bool(moves) + [f"meanwhile {reads}"] * bool(reads)
    session.out.print(f"fired when {', and '.join(proofs) or 'the readback is the only evidence'}", soft_wrap=True)
    session.out.print(
        f"and this does not: {', '.join(planned.mechanism.must_not_move) or 'nothing is named'}", soft_wrap=True
    )


def _any_of(witness: Witness) -> str:
    """Return a witness in words: its first counters, which are the most specific ones, and the number of the others."""
    left = len(witness.any_of) - MOST_COUNTERS
    return " or ".join(witness.any_of[:MOST_COUNTERS]) + (f" or {left} more (--json lists them)" if left > 0 else "")


def _steps_of(planned: PlannedFault) -> list[tuple[str, str]]:
    """Return each step and its revert; of a fault whose target is chosen later, those of each target it may have."""
    return [(step.do, step.undo) for option in planned.options for step in option.mechanism.steps]


def _checks_and_readbacks(planned: PlannedFault) -> list[str]:
    """Return the checks and readbacks of a fault that consists of commands, as lines."""
    args = planned.request["args"]
    if planned.request["actuator"] != "commands":
        return []
    needs = args["needs"]
    lines = [f"refused there without: {', '.join(need.replace('|', ' or ') for need in needs)}"] if needs else []
    lines += [
        f"refused there unless `{typed_command(words, needs)}` says {pattern}" for words, pattern, _ in args["able"]
    ]
    lines += [
        f"{{{name}}} is what `{typed_command(words, needs)}` prints before"
        for name, (words, _) in args["remember"].items()
    ]
    return [*lines, f"read back by `{typed_command(args['look'], needs)}`: {args['applied']}"]


def _show_receipt(
    session: Session, receipt: Receipt, unproven: Sequence[str], outcome: dirty.Outcome, *, as_json: bool
) -> None:
    if as_json:
        if outcome.state == "DIRTY":
            session.err.print(outcome.sentence, soft_wrap=True)
        compared = {"lab": outcome.sentence, "lab_diff": list(outcome.reasons)}
        session.json({**receipt.to_json(), "unproven": list(unproven), **compared})
        return
    fired = receipt.fired
    moved = _short({name: delta for name, delta in fired.must_move.items() if delta}) or "nothing"
    rows = [
        ("armed", _yes_or_no(receipt.armed.ok), receipt.armed.error or _short(receipt.armed.readback)),
        ("fired", _yes_or_no(fired.count > 0), f"{fired.count} times{_hit_text(fired)}; moved: {moved}"),
        ("cleared", _yes_or_no(receipt.cleared.ok), receipt.cleared.error or _short(receipt.cleared.readback)),
    ]
    session.table(("receipt", "", ""), rows, title=f"{receipt.kind} on {receipt.target} ({receipt.fidelity})")
    if fired.loss_unknown_why:
        session.out.print(f"whether something else ended it early is unknown: {fired.loss_unknown_why}", soft_wrap=True)
    for doubt in unproven:
        session.out.print(Text.assemble(("not proved", "yellow"), f": {doubt}"), soft_wrap=True)
    session.out.print(outcome.sentence, soft_wrap=True)
    if outcome.state == "DIRTY":
        session.out.print(Text.assemble(("DIRTY", "red"), ": `faultbed heal`, or on a soft lab `faultbed reset`"))
        for line in outcome.reasons:
            session.out.print(f"  {line}", soft_wrap=True)


def _hit_text(fired: Fired) -> str:
    passed = "" if fired.passed is None else f", of {fired.passed} packets"
    return passed + (f", {fired.selection}" if fired.selection else "")


def _yes_or_no(flag: bool) -> Text:  # noqa: FBT001 (one word from one flag)
    return styled("yes", "green") if flag else styled("no", "red")


def _short(values: Any) -> str:
    return ", ".join(f"{name}={value}" for name, value in dict(values).items())


def _kind_as_json(kind: catalogue.FaultKind) -> dict[str, Any]:
    return {
        "name": kind.name,
        "summary": kind.summary,
        "targets": list(kind.targets),
        "binding": dict(kind.binding),
        "fidelity": dict(kind.fidelity),
        "tried": list(kind.tried),
        "on_rack": kind.on_rack,
        "armed_by": kind.armed_by,
        "must_move": kind.must_move,
        "must_not_move": kind.must_not_move,
        "reversible": kind.reversible,
        "colour": kind.colour,
        "example": kind.command,
        "params": [dataclasses.asdict(param) for param in kind.params],
    }


COMMANDS = (faults, inject, heal)
