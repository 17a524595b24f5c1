"""The group `traffic` with the commands of all modules that add one to it."""

from __future__ import annotations

from harness.cli.traffic import jobs, replays, serving  # noqa: F401 (two of them only add commands to the group)

__all__ = ["COMMANDS"]

COMMANDS = jobs.COMMANDS
