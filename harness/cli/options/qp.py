"""Options of ranks and their queue pairs that several commands share: `--qp` and `--ranks-per-rnic`."""

from __future__ import annotations

import click

from faultbed.testbed.errors import UsageError
from faultbed.traffic.engine.task_specs import PATIENT_TIMEOUT, QpParams, check_qp
from faultbed.traffic.workloads.ranks import MAX_RANKS

__all__ = ["qp_option", "ranks_per_rnic_option"]


def _read(_context: click.Context, _parameter: click.Parameter, texts: tuple[str, ...]) -> QpParams:
    values = {"timeout": PATIENT_TIMEOUT}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not value.strip().isdecimal():
            raise UsageError(f"--qp {text}: write NAME=NUMBER, as in timeout=18")
        values[name.strip()] = int(value)
    params = QpParams.of(values)
    check_qp(params)
    return params


qp_option = click.option(
    "--qp",
    multiple=True,
    metavar="NAME=NUMBER",
    callback=_read,
    help=f"A parameter of the queue pairs, repeatable: {', '.join(QpParams.__slots__)} (timeout={PATIENT_TIMEOUT}).",
)

ranks_per_rnic_option = click.option(
    "--ranks-per-rnic",
    default=1,
    show_default=True,
    type=click.IntRange(1, MAX_RANKS),
    help="Ranks on each RNIC; the order of RNICs repeats.",
)
