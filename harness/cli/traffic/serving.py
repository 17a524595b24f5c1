"""Inference and ranking jobs: `faultbed traffic inference` and `faultbed traffic ranking`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from faultbed.harness.cli.context import Session, json_option, pass_session
from faultbed.harness.cli.options import rows_file
from faultbed.harness.cli.options.numbers import FiniteRange
from faultbed.harness.cli.options.qp import queue_pair_options
from faultbed.harness.cli.options.recording_options import out_option, write_rows
from faultbed.harness.cli.traffic.flows_and_collectives import exit_code, hosts_of, progress_reporter, read_size
from faultbed.harness.verdict import ExitCode
from faultbed.testbed.lab import Lab
from faultbed.traffic.engine.running_traffic import OnEvent
from faultbed.traffic.workloads import inference, ranking
from faultbed.traffic.workloads.inference import InferenceResult, InferenceSpec
from faultbed.traffic.workloads.ranking import RankingSpec

__all__ = ["COMMANDS"]

T = TypeVar("T")
RANK = click.option(
    "--rank",
    "ranks",
    multiple=True,
    help="RNIC of a rank, in rank order; repeatable. Default: the first of each host.",
)


@click.command("inference")
@click.option("--prefill-ranks", default=0, type=click.IntRange(0), help="Number of ranks that only prefill.")
@click.option("--prefill", default="4MiB", show_default=True, help="Bytes all-reduced by the prefill of a request.")
@click.option("--kv", default="1MiB", show_default=True, help="KV cache from a prefill rank to a decode rank.")
@click.option("--decode", default="64KiB", show_default=True, help="Bytes all-reduced for each token.")
@click.option("--tokens", default=16, show_default=True, type=click.IntRange(1), help="Output tokens of a request.")
@click.option("--requests", default=10, show_default=True, type=click.IntRange(1))
@click.option("--prefill-ms", default=0.0, type=FiniteRange(0), help="Computing before a prefill (a pause).")
@click.option("--decode-ms", default=0.0, type=FiniteRange(0), help="Computing before a token (a pause).")
@click.option("--slo-ttft-ms", default=0.0, type=FiniteRange(0), help="SLO: time to first token; 0: none.")
@click.option("--slo-tpot-ms", default=0.0, type=FiniteRange(0), help="SLO: mean time per output token; 0: none.")
@click.option(
    "--slo-share",
    default=0.99,
    show_default=True,
    type=FiniteRange(0, 1),
    help="FAIL if a smaller share of requests keeps the SLO.",
)
@RANK
@queue_pair_options
@out_option
@json_option
@pass_session
def inference_command(
    session: Session,
    /,
    *,
    prefill: str,
    kv: str,
    decode: str,
    ranks: tuple[str, ...],
    slo_share: float,
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Run an inference job (prefill, then tokens); print TTFT, TPOT and the share of requests that kept the SLO."""
    spec = InferenceSpec(
        ranks=ranks,
        prefill_bytes=read_size(prefill),
        kv_bytes=read_size(kv),
        decode_bytes=read_size(decode),
        **options,
    )
    result = _run(session, ranks, "inference", lambda lab, report: inference.run(lab, spec, on_event=report))
    write_rows(session, rows_file.of_ranks(result), out)
    if as_json:
        session.json(result.to_dict() | ({} if _has_slo(result) else {"slo_attainment": None}))
    else:
        _show_result(session, result)
    low, high = result.slo_attainment_range
    if result.wrong_elements or (result.outcome != "failed" and high < slo_share):
        return ExitCode.FAIL
    code = exit_code(session, result.outcome, result.where)
    if code == ExitCode.PASS and low < slo_share:
        session.err.print(
            f"SLO kept by {low:.1%} to {high:.1%} of requests: the others are within the error of two hosts' clocks, "
            "so nothing is decided; repeat it with an objective further away",
            soft_wrap=True,
        )
        return ExitCode.INCONCLUSIVE
    return code


def _has_slo(result: InferenceResult) -> bool:
    """Return whether there was an objective to keep; without one, every request would have kept it."""
    return bool(result.spec.slo_ttft_ms or result.spec.slo_tpot_ms)


def _show_result(session: Session, result: InferenceResult) -> None:
    session.table(
        ("requests", "TTFT P50/P99[ms]", "TPOT P50/P95/P99[ms]", "SLO kept", "#wrong"),
        [
            (
                str(result.requests_completed),
                f"{result.ttft_p50_ns / 1e6:.1f} / {result.ttft_p99_ns / 1e6:.1f}",
                " / ".join(f"{ns / 1e6:.1f}" for ns in (result.tpot_p50_ns, result.tpot_p95_ns, result.tpot_p99_ns)),
                f"{result.slo_attainment:.1%}" if _has_slo(result) else "no SLO",
                str(result.wrong_elements),
            )
        ],
    )
    if result.spec.prefill_ranks:
        error_ms = max(result.clock_error_ns.values()) / 1e6
        session.out.print(f"times to first token are by two hosts' clocks, which differ by up to {error_ms:.2f} ms")


@click.command("ranking")
@click.option("--embedding", default="1MiB", show_default=True, help="Size of the rows that each rank gets.")
@click.option(
    "--skew",
    default=1.0,
    show_default=True,
    type=FiniteRange(0),
    help="Zipf exponent of the shard sizes; 0: equal shards.",
)
@click.option("--dense", default="256KiB", show_default=True, help="Bytes all-reduced at the end of an iteration.")
@click.option("--dense-ms", default=0.0, type=FiniteRange(0), help="Computing between forward and backward.")
@click.option("--iterations", default=10, show_default=True, type=click.IntRange(1))
@RANK
@queue_pair_options
@out_option
@json_option
@pass_session
def ranking_command(
    session: Session,
    /,
    *,
    embedding: str,
    skew: float,
    dense: str,
    dense_ms: float,
    iterations: int,
    ranks: tuple[str, ...],
    out: Path | None,
    as_json: bool,
    **queue_pairs: Any,
) -> int:
    """Run a ranking job: skewed all-to-allv forward and backward, and an all-reduce."""
    spec = RankingSpec(
        ranks=ranks,
        embedding_bytes=read_size(embedding),
        skew=skew,
        dense_bytes=read_size(dense),
        dense_ms=dense_ms,
        iterations=iterations,
        **queue_pairs,
    )
    result = _run(session, ranks, "ranking", lambda lab, report: ranking.run(lab, spec, on_event=report))
    write_rows(session, rows_file.of_ranks(result), out)
    if as_json:
        session.json(result.to_dict())
    else:
        session.table(
            ("iterations", "MMR", "forward[ms]", "backward[ms]", "dense[ms]", "iteration P50/P95/P99[ms]", "#wrong"),
            [
                (
                    str(result.iterations_completed),
                    f"{result.mmr:.2f}",
                    *(f"{ns / 1e6:.1f}" for ns in (result.forward_ns, result.backward_ns, result.dense_ns)),
                    " / ".join(
                        f"{ns / 1e6:.1f}"
                        for ns in (result.iteration_p50_ns, result.iteration_p95_ns, result.iteration_p99_ns)
                    ),
                    str(result.wrong_elements),
                )
            ],
        )
    return ExitCode.FAIL if result.wrong_elements else exit_code(session, result.outcome, result.where)


def _run(session: Session, ranks: Sequence[str], title: str, run: Callable[[Lab, OnEvent], T]) -> T:
    inventory = session.inventory()
    with (
        session.working(inventory, hosts_of(inventory.topology, ranks), why=f"traffic {title}") as lab,
        session.progress() as progress,
    ):
        progress(f"connecting the ranks of the {title} job")
        return run(lab, progress_reporter(lab, progress))


COMMANDS = (inference_command, ranking_command)
