"""Commands about captured packets: `faultbed packets`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
from rich.text import Text

from faultbed.harness.cli.context import Session, json_option, pass_session, styled
from faultbed.harness.packets.analysis import Analysis, FlowReport, analyse
from faultbed.harness.packets.evidence import CAPTURE, Evidence, with_idle_ports
from faultbed.harness.quantities import format_duration
from faultbed.harness.record.rundir import open_run
from faultbed.harness.verdict import ExitCode
from faultbed.testbed.errors import UsageError
from faultbed.testbed.packets import capture_file
from faultbed.testbed.packets.bth import timeout_ns

__all__ = ["COMMANDS"]

_MOST_ROWS = 20
"""Episodes and broken rules printed; `--json` has all that the analysis keeps."""


@click.command()
@click.argument("capture", type=click.Path(path_type=Path))
@click.option("--explain", "frame", type=click.IntRange(min=1), metavar="FRAME", help="Dissect this frame instead.")
@json_option
@pass_session
def packets(session: Session, *, capture: Path, frame: int | None, as_json: bool) -> int:
    """Check RoCEv2 packets against go-back-N: a CAPTURE (pcap or pcapng), or a run directory with one.

    For each flow: missing packets, retransmissions with their cause (NAK, RNR or timer), and broken rules. Exits with 1
    if a rule is broken, and with 2 if the capture cannot prove that none is: it is empty, damaged, cut too short, or
    its queue pairs cannot be distinguished.

    With --explain: every header of one frame and whether its ICRC is correct, by scapy. Exits with 1 if it is wrong,
    and with 2 if the frame has none or is truncated.
    """
    path = capture / CAPTURE if capture.is_dir() else capture
    if capture.is_dir() and not path.exists():
        raise UsageError(f"{capture}: this run captured no packets; give its experiment a [capture] with ports")
    frames = capture_file.read(path)
    if frame is not None:
        return _explain(session, frames, frame, as_json=as_json)
    analysis = analyse(frames)
    gaps: tuple[str, ...] = ()
    if capture.is_dir():
        analysis, account = with_idle_ports(analysis), open_run(capture).read_packets()
        gaps = () if account is None else tuple(_gaps(account, analysis.frames))
        unknown = "the run kept no packets.json: the number of frames missing from the capture is unknown"
        doubts = (*gaps, *((unknown,) if account is None else ()), *analysis.doubts)
        analysis = msgspec.structs.replace(analysis, doubts=doubts)
    if as_json:
        session.json(msgspec.to_builtins(analysis))
    else:
        _show(session, analysis)
    if analysis.violations and not gaps:
        return ExitCode.FAIL
    return ExitCode.INCONCLUSIVE if analysis.doubts else ExitCode.PASS


def _gaps(account: Evidence, frames: int) -> Iterator[str]:
    """Yield why a run's capture may lack frames, by its `packets.json`; the file has this many frames."""
    if account.missed:
        yield (
            f"{account.missed:,} frames that the ports counted are missing from the capture, which can look like a "
            "broken rule"
        )
    if account.extra:
        yield (
            f"{account.extra:,} frames of the capture were not counted by the ports: each of them may hide a missing "
            "frame"
        )
    if account.analysis.frames != frames:
        yield (
            f"{CAPTURE} has {frames:,} frames, and the run captured {account.analysis.frames:,}: it is truncated, or "
            "of another run; copy the run directory again"
        )


def _explain(session: Session, frames: capture_file.Frames, frame: int, *, as_json: bool) -> int:
    # Imported here: scapy takes half a second, and only --explain needs it.
    from faultbed.testbed.packets.explain import explain  # noqa: PLC0415

    frame_fields = explain(frames, frame)
    if as_json:
        session.json(msgspec.to_builtins(frame_fields))
    else:
        direction = {None: "", True: ", sent by the port", False: ", received by the port"}[frame_fields.outbound]
        at = f" at {frame_fields.port}" if frame_fields.port else ""
        session.out.print(
            f"frame {frame_fields.frame}{at}{direction}, {frame_fields.time_ns / 1e9:.9f} s: {frame_fields.length:,} "
            f"bytes, {frame_fields.captured:,} of them captured",
            soft_wrap=True,
        )
        rows = [
            (layer.name if first else "", name, value)
            for layer in frame_fields.layers
            for first, (name, value) in zip((True, *[False] * len(layer.fields)), layer.fields.items(), strict=False)
        ]
        session.table(("header", "field", "value"), rows)
        session.out.print(f"payload: {frame_fields.payload_bytes:,} bytes; ICRC: {frame_fields.icrc}")
    return {"right": ExitCode.PASS, "wrong": ExitCode.FAIL}.get(frame_fields.icrc, ExitCode.INCONCLUSIVE)


def _show(session: Session, analysis: Analysis) -> None:
    session.out.print(f"{analysis.frames:,} frames, {analysis.roce:,} of them RoCEv2, {len(analysis.flows)} flows")
    counted = ("requests", "missing", "again", "NAK", "RNR", "timer", "reordered", "duplicates")
    columns = ("flow", "seen at", *counted, "broken rules")
    session.table(columns, [_row(flow) for flow in analysis.flows])
    episodes = list(_episodes(analysis))
    if episodes:
        session.out.print()
        session.table(
            ("frame", "flow", "went back to", "because", "lost", "sent again", "times"), episodes[:_MOST_ROWS]
        )
        if len(episodes) > _MOST_ROWS:
            session.out.print(f"... and {len(episodes) - _MOST_ROWS} more; --json has them")
    for flow in analysis.flows:
        for violation in flow.violations[:_MOST_ROWS]:
            details = f" frame {violation.frame}, {_name(flow)}, PSN {violation.psn}: {violation.detail}"
            session.out.print(Text.assemble((violation.rule, "red"), details), soft_wrap=True)
    for note in analysis.notes:
        session.out.print(note, soft_wrap=True)
    for doubt in analysis.doubts:
        session.out.print(Text.assemble(("INCONCLUSIVE", "yellow"), f" {doubt}"), soft_wrap=True)
    if not analysis.violations and not analysis.doubts:
        session.out.print(styled("no rule of go-back-N is broken", "green"))


def _name(flow: FlowReport) -> str:
    return f"{flow.src} -> {flow.dst} QP {flow.dqpn}"


def _row(flow: FlowReport) -> tuple[str, ...]:
    broken = ", ".join(f"{rule} {count}" for rule, count in flow.broken.items())
    broken = broken or ("not known" if flow.is_ambiguous else "none")
    causes = (str(flow.causes.get(cause, 0)) for cause in ("nak", "rnr", "timer"))
    place = f"{flow.port} ({flow.side})" if flow.port else flow.side
    return (
        _name(flow),
        place,
        f"{flow.requests:,}",
        str(flow.missing),
        str(flow.again),
        *causes,
        str(flow.reordered),
        str(flow.duplicates),
        broken,
    )


def _episodes(analysis: Analysis) -> Iterator[tuple[str, ...]]:
    for flow in analysis.flows:
        for episode in flow.episodes:
            if episode.timeout_step is not None:
                step = f"4.096 us * 2**{episode.timeout_step} = {format_duration(timeout_ns(episode.timeout_step))}"
                times = f"silent for {format_duration(episode.silence_ns)} ({step}), retry {episode.retry}"
            else:
                split = ((episode.generation_ns, "to NAK"), (episode.reaction_ns, "to the packet"))
                times = ", ".join(f"{format_duration(ns)} {reached}" for ns, reached in split if ns is not None)
            yield (
                str(episode.frame),
                _name(flow),
                f"PSN {episode.psn}",
                episode.cause,
                str(episode.missing),
                str(episode.resent),
                times,
            )


COMMANDS = (packets,)
