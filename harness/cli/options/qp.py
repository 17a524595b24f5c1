"""The option `--qp`: parameters of queue pairs."""

from __future__ import annotations

import click

from testbed.errors import UsageError
from traffic.engine.task_specs import PATIENT_TIMEOUT, QpParams, check_qp

__all__ = ["qp_option"]


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
