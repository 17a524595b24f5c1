"""The console command's entry point: loads the command line, which on a busy machine takes seconds."""

from __future__ import annotations

import importlib
import os
import sys
from typing import NoReturn

__all__ = ["main"]


def _open_closed() -> None:
    """Open a closed stdin, stdout or stderr (`>&-`) as /dev/null.

    The next file that is opened would otherwise get its number, and everything printed would go into that file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # Python has found it closed
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)  # noqa: FBT003 (the function takes it by position)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))


def main() -> NoReturn:
    """Load the commands and run them. Ctrl-C or a missing package while they load prints one sentence, no traceback."""
    _open_closed()
    try:
        commands = importlib.import_module("faultbed.harness.cli.main")
    except KeyboardInterrupt:
        sys.stderr.write("faultbed: interrupted before anything was started\n")
        sys.exit(3)
    except ImportError as error:
        sys.stderr.write(f"faultbed: incomplete installation: {error}; run `make setup` to install what is missing\n")
        sys.exit(3)
    sys.exit(commands.main())


if __name__ == "__main__":
    main()
