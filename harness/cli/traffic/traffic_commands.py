"""The group `traffic` with the commands of all modules that add one to it."""

from __future__ import annotations

from faultbed.harness.cli.traffic import jobs, replays, serving  # noqa: F401 (each adds its commands to the group)
from faultbed.harness.cli.traffic.traffic_group import traffic

__all__ = ["COMMANDS"]

COMMANDS = (traffic,)
