"""The group `traffic`."""

from __future__ import annotations

import click

from faultbed.harness.cli.command_group import Commands

__all__ = ["COMMANDS"]


@click.group(
    cls=Commands,
    sections={
        "Commands": {
            "faultbed.harness.cli.traffic.flows_and_collectives": "flow collective",
            "faultbed.harness.cli.traffic.jobs": "job",
            "faultbed.harness.cli.traffic.replays": "replay",
            "faultbed.harness.cli.traffic.serving": "inference ranking",
        }
    },
)
def traffic() -> None:
    """Run traffic without faults, and measure it like perftest and nccl-tests.

    `kill -USR1 PID` while ranks run writes their flight recorders to a file in the current directory and prints its
    name. The ranks continue.
    """


COMMANDS = (traffic,)
