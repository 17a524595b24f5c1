"""Commands that only make traffic: flow and collective (`harness/cli/traffic/jobs.py` adds traffic job)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.text import Text

from faultbed.harness.analysis.links.queue_wait import describe_wait, longest_wait
from faultbed.harness.cli.context import Session, json_option, pass_session
from faultbed.harness.cli.options import rows_file
from faultbed.harness.cli.options.parsed import parsed
from faultbed.harness.cli.options.qp import qp_option
from faultbed.harness.cli.options.recording_options import (
    check_record,
    out_option,
    record_options,
    write_record,
    write_rows,
)
from faultbed.harness.cli.options.section_options import section_from, section_options
from faultbed.harness.experiment.workload_file import Collective, Flow
from faultbed.harness.experiment.workload_specs import collective_spec, flow_specs
from faultbed.harness.run import flight_dump
from faultbed.harness.verdict import ExitCode
from faultbed.testbed.errors import UsageError
from faultbed.testbed.lab import Lab
from faultbed.testbed.model.selectors import select, select_one
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.units import parse_size_bytes
from faultbed.traffic.engine.engine_client import endpoint
from faultbed.traffic.engine.gid import gid_index
from faultbed.traffic.engine.run_results import Outcome
from faultbed.traffic.engine.running_traffic import OnEvent, Running
from faultbed.traffic.flows import flow_run as flow_module
from faultbed.traffic.flows import perftest_json as perftest_json_module
from faultbed.traffic.flows.flow_run import MEMORIES, FlowResult, FlowSpec, FlowsResult
from faultbed.traffic.flows.matrix import first_rnics, pairs_in
from faultbed.traffic.schedules import ALGORITHMS, COLLECTIVES, REDUCING, ROOTED
from faultbed.traffic.workloads import collective as collective_module
from faultbed.traffic.workloads import recording
from faultbed.traffic.workloads.collective import AUTO, CollectiveResult, CollectiveSpec
from faultbed.traffic.workloads.ranks import ITEM_BYTES

__all__ = ["COMMANDS", "check_names", "exit_code", "hosts_of", "read_size", "run_ranks", "specs_of"]

T = TypeVar("T")

PATIENCE_S = 120.0
FLOW_COLUMNS = (
    "src",
    "dst",
    "verb",
    "#bytes",
    "#sent",
    "#came",
    "#QPs",
    "goodput[Gb/s]",
    "rate[kmsg/s]",
    "P50/P99[us]",
    "#errors",
    "#rebuilds",
)
NCCL_TYPES = {"fp32": "float", "fp16": "half", "bf16": "bfloat16", "int32": "int32"}
ALGORITHM_NAMES = (AUTO, *dict.fromkeys(algorithm for _, algorithm in ALGORITHMS))
COLUMNS = (
    "size(B)",
    "count",
    "type",
    "redop",
    "root",
    "ranks",
    "algorithm",
    "time(us)",
    "algbw(GB/s)",
    "busbw(GB/s)",
    "#wrong",
)
REPORT_EVERY_S = 2.0


@click.command()
@click.argument("src", required=False)
@click.argument("dst", required=False)
@section_options(Flow, without=("src", "dst", "qp"), defaults={"flow": "write", "duration_ns": 5_000_000_000})
@click.option(
    "--memory",
    default="host",
    show_default=True,
    type=click.Choice(MEMORIES),
    help="cuda: buffers on the GPU at the RNIC's position in its host (rack labs; not yet run on hardware).",
)
@qp_option
@out_option
@click.option(
    "--perftest-json",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the flow as perftest does with --out_json (--latency: as its latency tests).",
)
@json_option
@pass_session
def flow(
    session: Session,
    /,
    *,
    src: str | None,
    dst: str | None,
    memory: str,
    out: Path | None,
    perftest_json: Path | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Flow from SRC to DST (RNICs, such as host1:rxe0 or rnic[0]), or a whole --pattern of flows.

    Without names, the flow goes from the first host to the last one, in another rack if there are several.
    """
    inventory, pattern = session.inventory(), options["pattern"]
    if pattern is not None and src is not None:
        raise UsageError("name SRC and DST, or a --pattern, not both")
    _check_perftest(perftest_json, pattern, options["spread"])
    ends = _flow_ends(inventory.topology)
    named = tuple(select_one(inventory.topology, text) for text in (src or ends[0], dst or ends[-1]))
    chosen = pairs_in(inventory.topology, pattern) if pattern else ((named[0], named[1]),)
    specs = specs_of(chosen, memory=memory, **options)
    for spec in specs:
        flow_module.check(spec)
        flow_module.check_on(inventory.kind, transport=spec.transport, qp=spec.qp, entropy=spec.entropy)
        check_names(inventory.topology, (spec.src, spec.dst))
    if (wait := longest_wait(inventory, specs)) is not None:
        session.err.print(Text.assemble(("slow link", "yellow"), f": {describe_wait(wait)}"), soft_wrap=True)
    hosts = sorted({name.partition(":")[0] for pair in chosen for name in pair})
    why = f"traffic flow {pattern or ' '.join(chosen[0])}"
    with session.working(inventory, hosts, why=why) as lab, session.progress() as progress:
        progress(f"connecting {len(specs)} flows")
        with flow_module.start_all(lab, specs, on_event=progress_reporter(lab, progress)) as running:
            result = running.wait((specs[0].duration_s or 0) + PATIENCE_S)
        if perftest_json is not None:
            sender = endpoint(lab.topology, specs[0].src)
            counts = perftest_json_module.document(result.flows[0], gid_index=gid_index(lab.node(sender.host), sender))
            perftest_json.write_text(counts)
    write_rows(session, rows_file.of_flows(result.flows), out)
    if as_json:
        session.json(result.to_dict())
    else:
        session.table(FLOW_COLUMNS, [_flow_row(flow_result) for flow_result in result.flows])
        for flow_result in result.flows:
            if flow_result.rnr is not None:
                session.out.print(
                    f"{flow_result.spec.src} -> {flow_result.spec.dst}: {flow_result.rnr}", soft_wrap=True
                )
            if flow_result.checked_bytes is not None:
                counts = f"{flow_result.checked_bytes} bytes checked, {flow_result.wrong_bytes} wrong"
                session.out.print(f"{flow_result.spec.src} -> {flow_result.spec.dst}: {counts}", soft_wrap=True)
        if len(result.flows) > 1:
            fairness = "" if result.jain_index is None else f", Jain index {result.jain_index:.3f}"
            session.out.print(f"{len(result.flows)} flows: {result.goodput_bps / 1e9:.3f} Gb/s in all{fairness}")
    return _exit_code_of_flows(session, result)


def specs_of(chosen: Sequence[tuple[str, str]], *, memory: str, **options: Any) -> list[FlowSpec]:
    """Return the flows between pairs of RNICs, with the options of `traffic flow`.

    Raises:
        UsageError: options contradict each other.
    """
    (src, dst), *_ = chosen
    ends = {} if options["pattern"] else {"src": src, "dst": dst}
    work: Flow = section_from(Flow, {**options, **ends})
    return [replace(spec, memory=memory) for spec in flow_specs(replace(work, pairs=tuple(chosen)))]


def _check_perftest(path: Path | None, pattern: str | None, spread: str) -> None:
    """Reject flows that perftest's file format cannot describe, before anything runs."""
    if path is None:
        return
    if pattern is not None:
        raise UsageError("--perftest-json: perftest has one flow in a file; name SRC and DST instead of a --pattern")
    if spread == "split":
        raise UsageError("--perftest-json: perftest splits no message over queue pairs; use another --spread")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--perftest-json {path}: there is no folder {path.parent}")


def _flow_row(result: FlowResult) -> tuple[str, ...]:
    latency = result.latency
    return (
        result.spec.src,
        result.spec.dst,
        f"{result.spec.verb} ({result.spec.transport})",
        str(result.spec.message_bytes),
        str(result.sent),
        str(result.messages),
        str(result.spec.qps),
        f"{result.goodput_bps / 1e9:.3f}",
        f"{result.messages / (result.window.duration_ns / 1e9) / 1e3:.3f}",
        f"{latency.p50_ns / 1e3:.0f} / {latency.p99_ns / 1e3:.0f}" if latency else "",
        str(len(result.qp_errors)),
        str(len(result.rebuilds)),
    )


@click.command()
@click.argument("name", default="all-reduce", type=click.Choice(COLLECTIVES))
@section_options(Collective, without=("collective", "qp"), defaults={"size_bytes": 1 << 20})
@qp_option
@out_option
@record_options
@json_option
@pass_session
def collective(
    session: Session,
    /,
    *,
    name: str,
    out: Path | None,
    record: Path | None,
    record_format: str,
    as_json: bool,
    **options: Any,
) -> int:
    """Run a collective with one rank per RNIC, and check every element of its results (nccl-tests' columns)."""
    if options["iterations"] is None and options["duration_ns"] is None:
        options["iterations"] = 10
    if name == "barrier":  # as in a replay
        options["size_bytes"] = ITEM_BYTES[options["dtype"]]
    spec = collective_spec(section_from(Collective, {"collective": name, **options}))
    collective_module.fit(session.inventory(), spec)
    check_record(record)
    result = run_ranks(
        session,
        spec.ranks,
        f"collective {name}",
        lambda lab, report: collective_module.start(lab, spec, on_event=report),
    )
    if record is not None:
        write_record(session, recording.of_collective(result), record, record_format)
    write_rows(session, rows_file.of_ranks(result), out)
    if as_json:
        session.json(result.to_dict())
    else:
        _print_collective(session, result)
    if result.wrong_elements:
        return ExitCode.FAIL
    return exit_code(session, result.outcome, result.where)


def _print_collective(session: Session, result: CollectiveResult) -> None:
    session.table(COLUMNS, [_collective_row(result)])
    session.out.print(
        f"{result.iterations_completed} iterations: P95 {result.time_p95_ns / 1e3:.0f} us, "
        f"P99 {result.time_p99_ns / 1e3:.0f}, longest {result.time_max_ns / 1e3:.0f}; "
        f"{len(result.qp_errors)} QP errors, {len(result.rebuilds)} rebuilds"
    )
    if result.latency_split is not None:
        session.out.print(f"mean of an operation on its last rank: {result.latency_split}")


def _collective_row(result: CollectiveResult) -> tuple[str, ...]:
    spec = result.spec
    speeds = (f"{result.time_ns / 1e3:.0f}", f"{result.algbw_gbytes_per_s:.5f}", f"{result.busbw_gbytes_per_s:.5f}")
    return (
        str(spec.size_bytes),
        str(_nccl_count(spec, len(result.ranks))),
        NCCL_TYPES[spec.dtype],
        spec.redop if spec.collective in REDUCING else "none",
        str(spec.root) if spec.collective in ROOTED else "-1",
        str(len(result.ranks)),
        result.algorithm,
        *(speeds if result.iterations_completed else ("n/a", "n/a", "n/a")),
        str(result.wrong_elements),
    )


def _nccl_count(spec: CollectiveSpec, ranks: int) -> int:
    """Return the number of elements as nccl-tests counts them: those between one rank and each other one."""
    share = spec.collective in ("all-gather", "reduce-scatter", "all-to-all", "all-to-allv")
    return spec.elements // ranks if share else spec.elements


def hosts_of(topology: Topology, ranks: Sequence[str]) -> list[str]:
    """Return the hosts of ranks given by name or selector, or every host if there are no ranks.

    Raises:
        UsageError: a rank is no RNIC of this lab.
    """
    check_names(topology, ranks)
    return sorted(
        {name.partition(":")[0] for text in ranks for name in select(topology, text)} or topology.host_by_name
    )


def check_names(topology: Topology, names: Iterable[str]) -> None:
    """Refuse RNICs that are not there, whether the lab is up or not.

    Raises:
        UsageError: with the name that may have been meant.
    """
    for text in names:
        for name in select(topology, text):
            endpoint(topology, name)


def run_ranks(session: Session, ranks: Sequence[str], title: str, start: Callable[[Lab, OnEvent], Running[T]]) -> T:
    """Start work on ranks (RNIC names; none: all hosts) and wait until it is over."""
    inventory = session.inventory()
    with (
        session.working(inventory, hosts_of(inventory.topology, ranks), why=f"traffic {title}") as lab,
        session.progress() as progress,
    ):
        progress(f"connecting the ranks of {title}")
        with start(lab, progress_reporter(lab, progress)) as running:
            # No timeout: iterations take as long as the lab needs, and the engines' stall deadline ends a hang.
            while not running.is_over:
                threading.Event().wait(0.2)
            return running.wait(PATIENCE_S)


def progress_reporter(lab: Lab, progress: Any) -> Any:
    """Return a handler of traffic events that prints the totals so far, at most every two seconds."""
    totals = {"bytes": 0, "iterations": 0, "reported": time.monotonic()}
    write_flights = flight_dump.writer(Path.cwd(), flight_dump.stem_now(), progress)

    def report(event: dict[str, Any]) -> None:
        lab.heartbeat()
        write_flights(event)
        match event["event"]:
            case "sample" if event.get("has_arrived", True):
                totals["bytes"] += sum(event["sizes"])
            case "iteration":
                totals["iterations"] = max(totals["iterations"], event["index"] + 1)
            case "qp_error" | "rebuilt" as name:
                progress(_event_text(name, event))
        if time.monotonic() - totals["reported"] > REPORT_EVERY_S:
            totals["reported"] = time.monotonic()
            done = f"{totals['iterations']} iterations, " if totals["iterations"] else ""
            progress(f"{done}{totals['bytes'] / 1e6:.1f} MB arrived" if done or totals["bytes"] else "running")

    return report


def _event_text(name: str, event: dict[str, Any]) -> str:
    if name == "qp_error":
        error = event["qp_error"]
        return f"QP failed: {error.endpoint} -> {error.peer}, {error.status}"
    rebuild = event["rebuild"]
    return f"QP rebuilt: {rebuild.src} -> {rebuild.dst}, after {rebuild.reason}"


def _flow_ends(topology: Topology) -> tuple[str, ...]:
    ends = first_rnics(topology)
    if len(ends) < 2:  # noqa: PLR2004 (a flow has two ends)
        raise UsageError("this lab has fewer than two hosts with RNICs: a flow has two ends")
    return tuple(ends)


def read_size(text: str) -> int:
    """Parse the option `--size`."""
    return parsed("--size", parse_size_bytes, text)


def _exit_code_of_flows(session: Session, result: FlowsResult) -> int:
    """Return the command's exit code: FAIL for wrong bytes, and for a flow of which no message arrived.

    A flow whose bytes were to be checked, and of which none was, is INCONCLUSIVE.
    """
    if any(flow_result.wrong_bytes for flow_result in result.flows):
        return ExitCode.FAIL
    code = exit_code(session, result.outcome, result.where)
    if code:
        return code
    if silent := [flow_result.spec for flow_result in result.flows if not flow_result.size_bytes]:
        sentence = (
            f": no message arrived on {_flow_names(silent)}; look for lost packets (faultbed probe), or use smaller "
            "messages (--size, --depth) or a longer timeout (--qp timeout=20) on slow links"
        )
        session.err.print(Text.assemble(("no data", "red"), sentence), soft_wrap=True)
        return ExitCode.FAIL
    if unchecked := [
        flow_result.spec for flow_result in result.flows if flow_result.spec.check and not flow_result.checked_bytes
    ]:
        sentence = f": no byte of {_flow_names(unchecked)} was checked; let it run longer (--for)"
        session.err.print(Text.assemble(("not checked", "yellow"), sentence), soft_wrap=True)
        return ExitCode.INCONCLUSIVE
    return ExitCode.PASS


def _flow_names(specs: Sequence[FlowSpec]) -> str:
    more = f" and {len(specs) - 1} more" if len(specs) > 1 else ""
    return f"{specs[0].src} -> {specs[0].dst}{more}"


def exit_code(session: Session, outcome: Outcome, where: str | None) -> int:
    """Return the command's exit code, and report on stderr what is not a plain success."""
    if outcome == "failed":
        session.err.print(Text.assemble(("failed", "red"), f": {where}"), soft_wrap=True)
        return ExitCode.ERROR
    if outcome == "recovered":
        session.err.print(Text.assemble(("recovered", "yellow"), ": QPs had to be rebuilt on the way"))
    return ExitCode.PASS


COMMANDS = (flow, collective)
