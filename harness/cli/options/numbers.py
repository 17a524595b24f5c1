"""Number options of the command line."""

from __future__ import annotations

from typing import Any

import click

from testbed.finite import what_is_wrong

__all__ = ["FiniteRange"]


class FiniteRange(click.FloatRange):
    """A float within a range. click's own FloatRange accepts NaN, and infinity where there is no upper end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the float, or fail as a usage error."""
        number = super().convert(value, param, ctx)
        if wrong := what_is_wrong(number):
            self.fail(wrong, param, ctx)
        return number
