"""Numbers and durations on the command line."""

from __future__ import annotations

from typing import Any

import click

from faultbed.harness.cli.options.parsed import parsed
from faultbed.testbed.finite import what_is_wrong
from faultbed.testbed.units import parse_duration_ns

__all__ = ["FiniteRange", "parse_duration"]


class FiniteRange(click.FloatRange):
    """A float within a range. click's own FloatRange accepts NaN, and infinity where there is no upper end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the float, or fail as a usage error."""
        number = super().convert(value, param, ctx)
        if wrong := what_is_wrong(number):
            self.fail(wrong, param, ctx)
        return number


def parse_duration(text: str) -> float:
    """Return the seconds of `--for`.

    Raises:
        UsageError: the text is no duration.
    """
    return parsed("--for", parse_duration_ns, text) / 1e9
