"""The console command's entry point: loads the command line, which on a busy machine takes seconds."""

from __future__ import annotations

import importlib
import sys
from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Load the commands and run them. Ctrl-C or a missing package while they load prints one sentence, no traceback."""
    try:
        commands = importlib.import_module("faultbed.harness.cli.main")
    except KeyboardInterrupt:
        sys.stderr.write("faultbed: interrupted before anything was started\n")
        sys.exit(3)
    except ImportError as error:
        sys.stderr.write(f"faultbed: incomplete installation: {error}; run `make setup` to install what is missing\n")
        sys.exit(3)
    sys.exit(commands.main())
