"""Replay traces: `faultbed traffic replay`."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from faultbed.harness.cli.context import Session, json_option, pass_session, styled
from faultbed.harness.cli.options.qp import qp_option
from faultbed.harness.cli.options.section_options import section_from, section_options
from faultbed.harness.cli.traffic.flows_and_collectives import exit_code, progress_reporter
from faultbed.harness.experiment.replayed import Replay, spec_of
from faultbed.harness.quantities import format_bytes, format_duration
from faultbed.harness.verdict import ExitCode
from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.traffic import traces
from faultbed.traffic.engine.engine_client import endpoint
from faultbed.traffic.schedules import cost
from faultbed.traffic.traces import Operation, Trace
from faultbed.traffic.workloads import replay
from faultbed.traffic.workloads.replay_batches import Batch, ReplaySpec, batches
from faultbed.traffic.workloads.replay_result import ReplayResult

__all__ = ["COMMANDS"]

COLUMNS = ("record", "collective", "algorithm", "size(B)", "ranks", "time(us)", "busbw(GB/s)", "recorded(us)")
PLAN_COLUMNS = ("record", "collective", "algorithm", "size(B)", "ranks", "waits")


@click.command("replay")
@click.argument("path", metavar="TRACE", type=click.Path(path_type=Path))
@click.option("--dry-run", is_flag=True, help="Print what would be replayed, and do nothing.")
@section_options(Replay, without=("replay", "qp"))
@qp_option
@json_option
@pass_session
def replay_command(
    session: Session,
    /,
    *,
    path: Path,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Replay the recorded communication of a job.

    TRACE is a PARAM comms trace (a file, or a folder of <rank>.json), or a Chakra execution trace (a folder of
    <name>.<rank>.et).

    Every element is checked. Records that cannot be replayed are listed by file and record.
    """
    inventory = session.inventory()
    work: Replay = section_from(Replay, {**options, "replay": str(path)})
    named = work.ranks or tuple(host.name for host in inventory.topology.hosts if host.rnics)
    names = [endpoint(inventory.topology, name).name for name in named]
    groups = None if work.groups is None else Path(work.groups)
    whole = traces.load(path, form=work.format, ranks=len(names), groups=groups, mirror=work.mirror)
    if whole.ranks > len(names) and not work.shrink:
        raise UsageError(
            f"{path} has {whole.ranks} ranks, but there are {len(names)} RNICs; --shrink replays only the operations "
            f"among its first {len(names)} ranks"
        )
    trace = traces.fitted(whole, ranks=len(names), scale=work.scale)
    spec = spec_of(replace(work, ranks=tuple(names[: trace.ranks])))
    network = cost.NETWORKS[inventory.kind]
    planned_batches = batches(trace, spec, network)
    blocking = [note for note in trace.notes if note.blocks]
    if dry_run:
        _show_plan(session, spec, trace, planned_batches, as_json=as_json)
        return ExitCode.PASS
    for note in trace.notes if not as_json else ():
        session.err.print(styled(f"{note.file} record {note.record}: {note.what}", "dim"), soft_wrap=True)
    if blocking and not work.skip_unsupported:
        first = blocking[0]
        raise UsageError(
            f"{first.file}: record {first.record}: {first.what} ({len(blocking)} such records); --dry-run lists them, "
            "--skip-unsupported replays the rest"
        )
    result = _replay(session, inventory, spec, trace)
    if as_json:
        session.json({**result.to_dict(), "not_replayed": _not_replayed(trace)})
    else:
        _show_result(session, result)
    return ExitCode.FAIL if result.wrong_elements else exit_code(session, result.outcome, result.where)


def _not_replayed(trace: Trace) -> list[dict[str, object]]:
    return [asdict(note) for note in trace.notes]


def _replay(session: Session, inventory: Inventory, spec: ReplaySpec, trace: Trace) -> ReplayResult:
    hosts = sorted({name.partition(":")[0] for name in spec.ranks})
    with session.working(inventory, hosts, why=f"traffic replay {trace.source}") as lab, session.progress() as progress:
        progress(f"connecting {trace.ranks} ranks for {len(trace.operations)} operations")
        return replay.run(lab, spec, trace, on_event=progress_reporter(lab, progress))


def _show_plan(
    session: Session, spec: ReplaySpec, trace: Trace, planned_batches: tuple[Batch, ...], *, as_json: bool
) -> None:
    rows = [
        (operation, algorithm, waits)
        for batch in planned_batches
        for operation, algorithm, waits in zip(batch.operations, batch.algorithms, _waits(batch), strict=True)
    ]
    if as_json:
        session.json(
            {
                "source": trace.source,
                "format": trace.format,
                "ranks": dict(enumerate(spec.ranks)),
                "batches": len(planned_batches),
                "operations": [_plain_operation(*row) for row in rows],
                "not_replayed": _not_replayed(trace),
            }
        )
        return
    session.table(
        PLAN_COLUMNS,
        [
            (
                str(operation.record),
                operation.collective,
                algorithm,
                str(operation.size_bytes),
                " ".join(str(member) for member in operation.members),
                format_duration(wait) if wait else "",
            )
            for operation, algorithm, wait in rows
        ],
    )
    kinds = Counter(operation.collective for operation, _, _ in rows)
    size = format_bytes(sum(operation.size_bytes for operation, _, _ in rows))
    session.out.print(
        f"{trace.source} ({trace.format}): {', '.join(f'{count} {kind}' for kind, count in kinds.items())}; {size} in "
        f"{len(planned_batches)} batch{'es' if len(planned_batches) > 1 else ''}",
        soft_wrap=True,
    )
    session.out.print("ranks: " + ", ".join(f"{rank} on {name}" for rank, name in enumerate(spec.ranks)))
    for note in trace.notes:
        treatment = styled("not supported", "red") if note.blocks else "skipped"
        details = f": {note.file} record {note.record}: {note.what}"
        session.out.print(Text.assemble(treatment, details), soft_wrap=True)


def _plain_operation(operation: Operation, algorithm: str, wait_ns: int) -> dict[str, Any]:
    return {
        "record": operation.record,
        "collective": operation.collective,
        "algorithm": algorithm,
        "size_bytes": operation.size_bytes,
        "members": operation.members,
        "root": operation.root,
        "counts_bytes": operation.counts,
        "wait_ns": wait_ns,
    }


def _waits(batch: Batch) -> list[int]:
    """Return what the first member of each operation waits for in its program, in ns; 0: nothing.

    That is a pause before the operation, or the time since the batch began until which it must not start: the larger
    number of both.
    """
    waits = []
    for operation, gates in zip(batch.operations, batch.gates, strict=True):
        gate = gates[0]
        waits.append(0 if gate is None else max(batch.programs[operation.members[0]]["pauses"][gate][1:]))
    return waits


def _show_result(session: Session, result: ReplayResult) -> None:
    session.table(
        COLUMNS,
        [
            (
                str(operation.record),
                operation.collective,
                operation.algorithm,
                str(operation.size_bytes),
                " ".join(str(member) for member in operation.members),
                f"{operation.time_ns / 1e3:.0f}",
                f"{operation.busbw_gbytes_per_s:.5f}",
                f"{operation.recorded_ns / 1e3:.0f}" if operation.recorded_ns else "",
            )
            for operation in result.operations
        ],
    )
    often = "once" if result.spec.repeat == 1 else f"{result.spec.repeat} times"
    session.out.print(
        f"{len(result.operations)} operations, {often}, in {format_duration(result.time_ns)}; "
        f"{result.wrong_elements} wrong elements, {len(result.qp_errors)} QP errors, {len(result.rebuilds)} rebuilds"
    )


COMMANDS = (replay_command,)
