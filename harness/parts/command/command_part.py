"""The programs of `[workload]` with `command` ended as planned, and their progress was read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from faultbed.harness.experiment.program.command_section import Command
from faultbed.harness.ledger.claims import Claim
from faultbed.harness.ledger.settle import Finding
from faultbed.harness.parts.command import program_output
from faultbed.harness.parts.part import Part, Planned, Row, View
from faultbed.harness.parts.passes import Active, Pass
from faultbed.traffic.node.programs.readers import COUNTERS
from faultbed.traffic.programs.program_results import ProgramEnd

__all__ = ["PART"]

_PROGRAMS, _PROGRESS = "programs", "progress"
_NOTHING_LEFT = "no process was left behind"
_READ = "progress was read"
_OWN = "nothing else was counted"


def _claims(planned: Planned) -> Iterator[Claim]:
    """Yield a claim about the ends of the processes, and one about the reader of their progress."""
    if not _is_ours(planned):
        return
    yield Claim(
        name=_PROGRAMS,
        says="Every program ended by itself with 0, or ran until its time was over, and left no process behind",
        conditions=(_NOTHING_LEFT,),
        members=tuple(_processes(planned.plan.workload)),
    )
    yield Claim(
        name=_PROGRESS,
        says="The reader of progress found that of the programs, and nothing else's",
        conditions=(_READ, _OWN),
    )


def _is_ours(planned: Planned) -> bool:
    return "command" in planned.plan.workload and "roles" in planned.plan.workload


def _processes(workload: Mapping[str, Any]) -> Iterator[str]:
    for role, rnics in workload["roles"].items():
        yield from (_process(role, rnic) for rnic in rnics)


def _process(role: str, rnic: str) -> str:
    return f"{role} on {rnic}"


def _row(claim: Claim, view: View) -> Row | None:
    """Return how the processes ended, or what the reader of their progress found."""
    return _programs(claim, view) if claim.name == _PROGRAMS else _progress(view)


def _programs(claim: Claim, view: View) -> Row | None:
    ends = view.run.workload.programs
    if ends is None:
        return None
    last = {_process(end.role, end.rnic): end for end in sorted(ends, key=lambda end: (end.end_ns, end.attempt))}
    bad = [end for name, end in last.items() if name in claim.members and not _is_as_planned(end)]
    left = tuple(_leftovers(end) for end in ends if end.left or not end.removed)
    starts = sum(end.attempt > 1 for end in ends)
    detail = "; ".join(end.describe() for end in (bad or last.values()))
    notes = [f"{starts} restarts" if starts else "", *(_cut(end) for end in ends if end.cut_bytes)]
    return Row(
        finding=Finding(
            conditions={_NOTHING_LEFT: left},
            members={
                name: () if name in last else ("how it ended is not known: no record says so",)
                for name in claim.members
            },
            refuted="; ".join(end.describe() for end in bad) or None,
        ),
        observed=len(bad),
        bound=0,
        comparison="equals",
        unit="count",
        detail="; ".join(filter(None, (detail, *notes, *left))) or "no end of a program was recorded",
    )


def _is_as_planned(end: ProgramEnd) -> bool:
    return not end.timed_out and (end.stopped or end.code == 0)


def _leftovers(end: ProgramEnd) -> str:
    name = _process(end.role, end.rnic)
    if not end.removed:
        return f"{name}: its processes are not known to be gone; look for them on {end.rnic.partition(':')[0]}"
    return (
        f"{name} left {end.left} process{'' if end.left == 1 else 'es'} behind, which were ended, so what they did at "
        "the end is unknown; run the program in the foreground"
    )


def _cut(end: ProgramEnd) -> str:
    return f"{end.cut_bytes:,} bytes of the output of {_process(end.role, end.rnic)} were not kept"


def _progress(view: View) -> Row | None:
    work, planned = view.run.workload, view.planned.plan
    reader = planned.workload.get("progress")
    sizes = [sum(sample.bytes for sample in series.samples) for series in work.series]
    steps = sum(len(series.iterations) for series in work.series)
    detail = f"{reader}: {sum(sizes):,} bytes and {steps} iterations, at intervals of {work.sample_ns / 1e9:g} s"
    found = bool(work.series) and (any(sizes) or steps)
    others = [name for name, there in (("probes", planned.probe), ("the bystander", planned.bystander)) if there]
    missing = () if found else (f"{reader} found no progress; look at what the programs printed, in output/",)
    counted = f"the counters include the packets of {' and '.join(others)}; leave them out, or read the output"
    mixed = (counted,) if reader == COUNTERS and others else ()
    return Row(
        finding=Finding(conditions={_READ: missing, _OWN: mixed}),
        observed=sum(sizes),
        unit="bytes",
        detail="; ".join((detail, *missing, *mixed)),
    )


class _Output(Active):
    """What the programs of the measured pass printed: files beside the evidence."""

    def __init__(self, run: Pass) -> None:
        self._run = run

    def sealed(self) -> None:
        output = getattr(self._run.work.result, "output", None)
        if output is not None:
            program_output.write(self._run.setting.run_dir.path, output, t0_ns=self._run.work.t0_ns)


def _active(run: Pass) -> Active | None:
    is_ours = run.phase == "measured" and isinstance(run.setting.experiment.workload, Command)
    return _Output(run) if is_ours else None


PART = Part(name="command", claims=_claims, row=_row, active=_active)
