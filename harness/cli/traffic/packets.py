"""Commands about captured packets: `faultbed packets`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import click
import msgspec
from rich.text import Text

from faultbed.harness.cli.context import Session, json_option, pass_session
from faultbed.harness.packets.analysis import Analysis, FlowReport, Nak, analyse
from faultbed.harness.packets.annotations import comment_of_file, comments_of_frames
from faultbed.harness.packets.congestion_signals import Answers
from faultbed.harness.packets.episodes import Episode
from faultbed.harness.packets.evidence import CAPTURE, Evidence, with_idle_ports
from faultbed.harness.quantities import format_duration
from faultbed.harness.record.rundir import open_run
from faultbed.harness.verdict import ExitCode
from faultbed.testbed.errors import UsageError
from faultbed.testbed.packets import capture_file
from faultbed.testbed.packets.bth import timeout_ns
from faultbed.testbed.packets.cnp_rule import CnpRule, CnpScope
from faultbed.testbed.packets.frames import Frames
from faultbed.testbed.packets.pcapng_writer import write_pcapng
from faultbed.testbed.units import parse_duration_ns

__all__ = ["COMMANDS"]

_MOST_ROWS = 20
"""Episodes and broken rules printed; `--json` has all that the analysis keeps."""


@click.command()
@click.argument("capture", type=click.Path(path_type=Path))
@click.option("--explain", "frame", type=click.IntRange(min=1), metavar="FRAME", help="Dissect this frame instead.")
@click.option(
    "--annotate",
    type=click.Path(path_type=Path),
    metavar="OUT",
    help="Write a copy (pcapng) with a comment in each frame that shows a finding.",
)
@click.option(
    "--cnp-interval",
    metavar="TIME",
    help="Check that a CNP answers marked packets; the receiver's documentation names the interval (50us).",
)
@click.option(
    "--cnp-per",
    type=click.Choice(get_args(CnpScope)),
    default="qp",
    show_default=True,
    help="The receiver limits CNPs for each queue pair, each source address, or its whole port.",
)
@json_option
@pass_session
def packets(
    session: Session,
    *,
    capture: Path,
    frame: int | None,
    annotate: Path | None,
    cnp_interval: str | None,
    cnp_per: CnpScope,
    as_json: bool,
) -> int:
    """Check RoCEv2 packets against go-back-N: a CAPTURE (pcap or pcapng), or a run directory with one.

    For each flow: missing packets, retransmissions with their cause (NAK, RNR, gap in response data, or timer), NAKs,
    and broken rules. Exits with 1 if a rule is broken, and with 2 if the capture cannot prove that none is: it is
    empty, damaged, cut too short, its queue pairs cannot be distinguished, or data is still missing at its end.

    Mirrors and tunnels (ERSPAN, Everflow, VXLAN, Geneve, GRE) and captures of `tcpdump -i any` and `ibdump --erf` are
    decoded; what is not decoded is named.

    With --cnp-interval, for a capture at the receivers' ports: a packet with congestion experienced (CE) needs a CNP in
    the interval before it, or in half of it after the packet; a missing one is a broken rule.

    With --annotate: the verdict, doubts and findings are comments in the copy, which Wireshark shows and filters
    (frame.comment). Frames, times, ports and directions are those of the capture; its own comments are not kept.

    With --explain: every header of one frame and whether its ICRC is correct, by scapy. Exits with 1 if it is wrong,
    and with 2 if the frame has none or is truncated.
    """
    path = capture / CAPTURE if capture.is_dir() else capture
    if capture.is_dir() and not path.exists():
        raise UsageError(f"{capture}: this run captured no packets; give its experiment a [capture] with ports")
    if frame is not None and annotate is not None:
        raise UsageError("--explain and --annotate: give one of them")
    frames = capture_file.read(path)
    if frame is not None:
        return _explain(session, frames, frame, as_json=as_json)
    analysis = analyse(frames, cnp=None if cnp_interval is None else _cnp_rule(cnp_interval, cnp_per))
    analysis = msgspec.structs.replace(analysis, doubts=(*analysis.doubts, *_unknown_answers(analysis)))
    gaps: tuple[str, ...] = ()
    if capture.is_dir():
        analysis, account = with_idle_ports(analysis), open_run(capture).read_packets()
        gaps = () if account is None else tuple(_gaps(account, analysis.frames))
        unknown = "the run kept no packets.json: the number of frames missing from the capture is unknown"
        doubts = (*gaps, *((unknown,) if account is None else ()), *analysis.doubts)
        analysis = msgspec.structs.replace(analysis, doubts=doubts)
    written = None if annotate is None else _annotate(analysis, frames, path, annotate)
    if as_json:
        session.json(msgspec.to_builtins(analysis))
    else:
        _show(session, analysis)
        if written is not None:
            session.out.print(written, soft_wrap=True)
    missing = sum(answers.missing for answers in analysis.cnp or ())
    if (analysis.violations or missing) and not gaps:
        return ExitCode.FAIL
    return ExitCode.INCONCLUSIVE if analysis.doubts else ExitCode.PASS


def _annotate(analysis: Analysis, frames: Frames, source: Path, copy: Path) -> str:
    if copy.exists():
        raise UsageError(f"--annotate {copy}: it exists already; name a new file")
    comments = comments_of_frames(analysis)
    try:
        write_pcapng(copy, frames, comment=comment_of_file(analysis, str(source)), comments=comments)
    except (OSError, ValueError) as error:
        copy.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"--annotate {copy}: {reason}; name a file that can be written") from error
    return f"{copy}: {len(frames):,} frames, {len(comments):,} of them with a comment"


def _cnp_rule(interval: str, per: CnpScope) -> CnpRule:
    try:
        interval_ns = parse_duration_ns(interval)
    except ValueError as error:
        raise UsageError(f"--cnp-interval: {error}; give a time such as 50us") from error
    if interval_ns <= 0:
        raise UsageError(f"--cnp-interval: {interval} must be more than 0; give a time such as 50us")
    return CnpRule(interval_ns=interval_ns, per=per)


def _unknown_answers(analysis: Analysis) -> Iterator[str]:
    """Yield why it is not known whether marked packets were answered."""
    if analysis.cnp is None:
        return
    if not any(answers.marked for answers in analysis.cnp):
        yield "no marked packet (CE) passed a port of its receiver, so no CNP was owed; capture where packets arrive"
    for answers in analysis.cnp:
        if answers.unknown:
            yield (
                f"{answers.scope}: whether {answers.unknown:,} of {answers.marked:,} marked packets were answered by a "
                "CNP is not known: the capture begins or ends there, lacks packets, or its CNPs cannot be told apart"
            )


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


def _explain(session: Session, frames: Frames, frame: int, *, as_json: bool) -> int:
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
        session.out.print(
            f"payload: {frame_fields.payload_bytes:,} bytes, and {frame_fields.pad_bytes} of padding; ICRC: "
            f"{frame_fields.icrc}; behind the IP packet: {frame_fields.trailer_bytes} bytes, FCS: {frame_fields.fcs}"
        )
    return {"right": ExitCode.PASS, "wrong": ExitCode.FAIL}.get(frame_fields.icrc, ExitCode.INCONCLUSIVE)


def _show(session: Session, analysis: Analysis) -> None:
    session.out.print(f"{analysis.frames:,} frames, {analysis.roce:,} of them RoCEv2, {len(analysis.flows)} flows")
    counted = ("requests", "missing", "again", "NAK", "RNR", "gap", "timer", "reordered", "duplicates")
    columns = ("flow", "seen at", *counted, "broken rules")
    session.table(columns, [_row(flow) for flow in analysis.flows])
    data = [flow for flow in analysis.flows if flow.data_missing or flow.data_repeated]
    if data:
        session.out.print()
        session.table(
            ("response data of", "lost", "came again", "reordered", "repeated"), [_data_row(flow) for flow in data]
        )
    _rows(session, ("frame", "flow", "went back to", "because", "lost", "sent again", "times"), _episodes(analysis))
    _rows(session, ("frame", "flow", "PSN", "syndrome", "meaning"), _naks(analysis))
    for flow in analysis.flows:
        for violation in flow.violations[:_MOST_ROWS]:
            details = f" frame {violation.frame}, {_name(flow)}, PSN {violation.psn}: {violation.detail}"
            session.out.print(Text.assemble((violation.rule, "red"), details), soft_wrap=True)
    for answers in analysis.cnp or ():
        _show_answers(session, answers)
    for note in analysis.notes:
        session.out.print(note, soft_wrap=True)
    for doubt in analysis.doubts:
        session.out.print(Text.assemble(("INCONCLUSIVE", "yellow"), f" {doubt}"), soft_wrap=True)
    ended = "; ".join(_ending(flow, nak) for flow, nak in analysis.fatal_naks[:_MOST_ROWS])
    missing = any(answers.missing for answers in analysis.cnp or ())
    if not analysis.violations and not analysis.doubts and not missing:
        ended = f"; {ended}" if ended else ""
        session.out.print(Text.assemble(("no rule of go-back-N is broken", "green"), ended), soft_wrap=True)
    elif ended:
        session.out.print(ended, soft_wrap=True)


def _show_answers(session: Session, answers: Answers) -> None:
    gap = f"{'more than ' if answers.is_gap_open else ''}{format_duration(answers.gap_ns)}"
    details = f"{answers.marked:,} marked packets, {answers.sent:,} CNPs, longest wait {gap}"
    if answers.missing:
        text = Text.assemble(
            ("cnp-missing", "red"),
            f" frame {answers.first_missing}, {answers.scope}: {answers.missing:,} CNPs are missing; {details}",
        )
        session.out.print(text, soft_wrap=True)
    else:
        session.out.print(f"CNPs of {answers.scope}: {details}", soft_wrap=True)


def _rows(session: Session, columns: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> None:
    """Print a table if it has rows, and how many of them are left out."""
    every = list(rows)
    if every:
        session.out.print()
        session.table(columns, every[:_MOST_ROWS])
    if len(every) > _MOST_ROWS:
        session.out.print(f"... and {len(every) - _MOST_ROWS} more; --json has them")


def _ending(flow: FlowReport, nak: Nak) -> str:
    return f"{_name(flow)} was ended by frame {nak.frame}: {nak.meaning} (0x{nak.syndrome:02x}) of PSN {nak.psn}"


def _naks(analysis: Analysis) -> Iterator[tuple[str, ...]]:
    """Yield a row for each negative acknowledgement; those that end a connection come first."""
    every = [(flow, nak) for flow in analysis.flows for nak in flow.negative]
    for flow, nak in sorted(every, key=lambda pair: not pair[1].is_fatal):
        meaning = f"{nak.meaning}: ends the connection" if nak.is_fatal else nak.meaning
        yield str(nak.frame), _name(flow), str(nak.psn), f"0x{nak.syndrome:02x}", meaning


def _data_row(flow: FlowReport) -> tuple[str, ...]:
    counts = (flow.data_missing, flow.data_returned, flow.data_reordered, flow.data_repeated)
    return (_name(flow), *(f"{count:,}" for count in counts))


def _name(flow: FlowReport) -> str:
    return f"{flow.src} -> {flow.dst} QP {flow.dqpn}"


def _row(flow: FlowReport) -> tuple[str, ...]:
    broken = ", ".join(f"{rule} {count}" for rule, count in flow.broken.items())
    broken = broken or ("not known" if flow.is_ambiguous or not flow.is_checked else "none")
    causes = (str(flow.causes.get(cause, 0)) for cause in ("nak", "rnr", "gap", "timer"))
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
            yield (
                str(episode.frame),
                _name(flow),
                f"PSN {episode.psn}",
                _CAUSES.get(episode.cause, episode.cause),
                str(episode.missing),
                str(episode.resent),
                _times(episode),
            )


_CAUSES = {"gap": "gap in the responses (implied NAK)", "unknown": "not captured"}


def _times(episode: Episode) -> str:
    """Return where the time of an episode went."""
    if episode.timeout_step is not None:
        step = f"4.096 us * 2**{episode.timeout_step} = {format_duration(timeout_ns(episode.timeout_step))}"
        return f"silent for {format_duration(episode.silence_ns)} ({step}), retry {episode.retry}"
    signal = {"rnr": "to the RNR NAK", "nak": "to the NAK"}.get(episode.cause, "")
    since = " after the gap" if episode.cause == "gap" else " to the packet"
    parts = (
        None if episode.generation_ns is None else f"{format_duration(episode.generation_ns)} {signal}",
        None if episode.rnr_timer_ns is None else f"asked to wait {format_duration(episode.rnr_timer_ns)}",
        None if episode.reaction_ns is None else f"{format_duration(episode.reaction_ns)}{since}",
        f"retry {episode.retry}" if episode.cause == "rnr" else None,
    )
    return ", ".join(part for part in parts if part is not None)


COMMANDS = (packets,)
