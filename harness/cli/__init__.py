"""The command line: `faultbed`.

Commands live beside this file by subject: the lab, faults, traffic, experiments.
"""

from __future__ import annotations

from faultbed.harness.cli.main import main

__all__ = ["main"]
