"""The group `traffic` with the commands of all modules that add one to it."""

from __future__ import annotations

from harness.cli.traffic import jobs, replays, serving

__all__ = ["COMMANDS"]

COMMANDS = tuple({*jobs.COMMANDS, *replays.COMMANDS, *serving.COMMANDS})
"""The group alone."""
