"""Options of queue pairs: `--qp`, and for ranks their number and how data is spread over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from faultbed.testbed.errors import UsageError
from faultbed.traffic.engine.task_specs import PATIENT_TIMEOUT, QpParams, check_qp
from faultbed.traffic.schedules import MAX_QPS_PER_PEER, SPREADS
from faultbed.traffic.workloads.ranks import MAX_RANKS

__all__ = ["qp_option", "queue_pair_options", "ranks_per_rnic_option"]

F = TypeVar("F", bound=Callable[..., Any])


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

_OF_RANKS = (
    click.option(
        "--qps-per-peer",
        default=1,
        show_default=True,
        type=click.IntRange(1, MAX_QPS_PER_PEER),
        help="Queue pairs from a rank to each rank that it sends to.",
    ),
    click.option(
        "--spread",
        default=SPREADS[0],
        show_default=True,
        type=click.Choice(SPREADS),
        help="Distribution of messages over these queue pairs. split: equal parts of each message; round-robin and "
        "spray: segments in turn, which arrive in order or in any order; dqplb: each segment takes the queue pair with "
        "the fewest in flight.",
    ),
    click.option(
        "--entropy",
        default=0,
        show_default=True,
        type=click.IntRange(0),
        help="Number of UDP source ports that all queue pairs share (low entropy); 0: each has its own.",
    ),
    qp_option,
)


def queue_pair_options(command: F) -> F:
    """Add the options of queue pairs between ranks, named as in `RanksSpec` of `traffic/workloads/ranks.py`."""
    for option in reversed(_OF_RANKS):
        command = option(command)
    return command


ranks_per_rnic_option = click.option(
    "--ranks-per-rnic",
    default=1,
    show_default=True,
    type=click.IntRange(1, MAX_RANKS),
    help="Ranks on each RNIC; the order of RNICs repeats.",
)
