"""Inference and ranking jobs: `faultbed traffic inference` and `faultbed traffic ranking`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from faultbed.harness.cli.context import Session, json_option, pass_session
from faultbed.harness.cli.options import rows_file
from faultbed.harness.cli.options.numbers import FiniteRange
from faultbed.harness.cli.options.qp import qp_option
from faultbed.harness.cli.options.recording_options import out_option, write_rows
from faultbed.harness.cli.options.section_options import section_from, section_options
from faultbed.harness.cli.traffic.flows_and_collectives import exit_code, hosts_of, progress_reporter
from faultbed.harness.experiment.workload_file import Inference, Ranking
from faultbed.harness.verdict import ExitCode
from faultbed.testbed.lab import Lab
from faultbed.traffic.engine.running_traffic import OnEvent
from faultbed.traffic.workloads import inference, ranking
from faultbed.traffic.workloads.inference import InferenceResult, InferenceSpec
from faultbed.traffic.workloads.ranking import RankingSpec

__all__ = ["COMMANDS"]

T = TypeVar("T")


@click.command("inference")
@section_options(Inference, without=("qp",), defaults={"requests": 10})
@click.option(
    "--slo-share",
    default=0.99,
    show_default=True,
    type=FiniteRange(0, 1),
    help="FAIL if a smaller share of requests keeps the SLO.",
)
@qp_option
@out_option
@json_option
@pass_session
def inference_command(
    session: Session,
    /,
    *,
    slo_share: float,
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Run an inference job (prefill, then tokens); print TTFT, TPOT and the share of requests that kept the SLO."""
    spec: InferenceSpec = section_from(Inference, options)
    result = _run(session, spec.ranks, "inference", lambda lab, report: inference.run(lab, spec, on_event=report))
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
@section_options(Ranking, without=("qp",), defaults={"embedding_bytes": 1 << 20, "iterations": 10})
@qp_option
@out_option
@json_option
@pass_session
def ranking_command(
    session: Session,
    /,
    *,
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Run a ranking job: skewed all-to-allv forward and backward, and an all-reduce."""
    spec: RankingSpec = section_from(Ranking, options)
    result = _run(session, spec.ranks, "ranking", lambda lab, report: ranking.run(lab, spec, on_event=report))
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
