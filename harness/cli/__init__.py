"""The command line: `faultbed`.

Commands live beside this file by subject: the lab, faults, traffic, experiments.
"""

from __future__ import annotations

import importlib
import sys
from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Entry point of the console command; loads the commands, which on a busy machine takes seconds."""
    try:
        commands = importlib.import_module("harness.cli.main")
    except KeyboardInterrupt:
        sys.stderr.write("faultbed: interrupted before anything was started\n")
        sys.exit(3)
    sys.exit(commands.main())
