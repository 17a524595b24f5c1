"""The root command."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import NoReturn

import click

import faultbed
from faultbed.harness.cli.command_group import Commands, Sections
from faultbed.harness.cli.ending import end_with
from faultbed.harness.cli.options.names import lab_option
from faultbed.testbed.directories import act_as_owner, home_dir
from faultbed.traffic.engine import dump_signal

__all__ = ["cli", "main"]

_EPILOG = """
\b
Exit codes: 0 PASS, 1 FAIL, 2 INCONCLUSIVE, 3 ERROR, 4 usage, 5 DIRTY lab.
SIGUSR1 (kill -USR1 PID) makes a command that runs ranks write their flight recorders to a file; the ranks continue.
State is kept in FAULTBED_HOME (~/.local/state/faultbed), images in FAULTBED_CACHE (~/.cache/faultbed).
"""


SECTIONS: Sections = {
    "Lab": {
        "faultbed.harness.cli.lab.labs": "doctor up status reset down ssh",
        "faultbed.harness.cli.lab.watching": "counters top",
    },
    "Machines of a lab": {
        "faultbed.harness.cli.lab.inventories": "inventory",
        "faultbed.harness.cli.lab.provisioning": "provision",
        "faultbed.harness.cli.lab.preflights": "preflight support-bundle",
        "faultbed.harness.cli.traffic.probing": "probe",
    },
    "Lab shared by several people": {
        "faultbed.harness.cli.lab.sharing": "reserve release",
        "faultbed.harness.cli.lab.audits": "audit power-cycle",
    },
    "Faults": {
        "faultbed.harness.cli.experiments.faults": "faults inject heal",
        "faultbed.harness.cli.lab.witnessing": "witness",
        "faultbed.harness.cli.experiments.profile_commands": "profile",
    },
    "Traffic": {
        "faultbed.harness.cli.traffic.traffic_commands": "traffic",
        "faultbed.harness.cli.traffic.bisecting": "bisection",
        "faultbed.harness.cli.lab.routing_commands": "routing",
        "faultbed.harness.cli.lab.te_commands": "te",
    },
    "Experiments": {
        "faultbed.harness.cli.experiments.initializing": "init schema",
        "faultbed.harness.cli.experiments.runs": "run",
        "faultbed.harness.cli.experiments.sweeping": "sweep",
        "faultbed.harness.cli.traffic.scoring": "scorecard",
        "faultbed.harness.cli.experiments.working": "worker",
        "faultbed.harness.cli.experiments.shrinking": "shrink",
        "faultbed.harness.cli.experiments.fuzzing": "fuzz",
        "faultbed.harness.cli.experiments.attribution": "campaign",
    },
    "Model (no lab is touched)": {
        "faultbed.harness.cli.model.predicting": "predict",
        "faultbed.harness.cli.model.calibrating": "calibrate",
        "faultbed.harness.cli.model.congesting": "congestion",
        "faultbed.harness.cli.model.placing": "place",
    },
    "Results": {
        "faultbed.harness.cli.experiments.runs": "report",
        "faultbed.harness.cli.traffic.packets": "packets",
        "faultbed.harness.cli.experiments.attribution": "attribute",
        "faultbed.harness.cli.experiments.histories": "history noise",
        "faultbed.harness.cli.model.equivalent": "equivalent",
        "faultbed.harness.cli.experiments.querying": "query",
        "faultbed.harness.cli.experiments.offending": "offenders",
        "faultbed.harness.cli.experiments.ci": "summary",
    },
}
"""Headings of `faultbed --help` with their modules and commands, in the order in which they are shown."""


@click.group(
    cls=Commands,
    sections=SECTIONS,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@lab_option
@click.option("--timestamps", is_flag=True, help="Begin each progress line with the date and the time in UTC.")
@click.version_option(faultbed.__version__, prog_name="faultbed")
@click.pass_context
def cli(ctx: click.Context, lab: Path | None, *, timestamps: bool) -> None:
    """Test a RoCE fabric under faults: lab, traffic, faults that prove they fired, verdicts.

    \b
    First steps:
      faultbed doctor                              check the prerequisites of this machine
      faultbed up                                  a lab of soft-RoCE VMs: hosts, switches, BGP, ECMP
      faultbed run demo                            a job, three faults, a verdict, a report
      faultbed down
    """  # noqa: D301 - that is click's sign for a paragraph that keeps its lines, and must be the character itself
    from faultbed.harness.cli.context import Session  # noqa: PLC0415 - it imports a lab's connections: 0.3 s of CPU

    ctx.obj = Session(lab, timestamps=timestamps)


def main() -> NoReturn:
    """Entry point of the console command."""
    signal.signal(signal.SIGUSR1, dump_signal.request_dump)  # its default is to end the process
    if (user := act_as_owner()) is not None:
        sys.stderr.write(f"faultbed: acting as {user}, who owns {home_dir()}\n")
    end_with(cli, "faultbed")
