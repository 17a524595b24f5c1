"""The option `--weight`: shares of links under the routing scheme `weighted`."""

from __future__ import annotations

import click

from faultbed.harness.cli.options.numbers import FiniteRange
from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.topology import Topology

__all__ = ["weight_option", "weights_of"]

_SHARE = FiniteRange(0.01, 100.0)

weight_option = click.option(
    "--weight",
    "weights",
    multiple=True,
    metavar="LINK=SHARE",
    help="weighted: share of a link (default 1); repeatable.",
)


def weights_of(topology: Topology, words: tuple[str, ...]) -> dict[str, float]:
    """Return the share of each link that `words` name.

    Raises:
        UsageError: a word is not LINK=SHARE, or no link between switches has that name.
    """
    weights = {}
    names = {link.name for link in topology.uplinks}
    for word in words:
        name, equals, share = word.rpartition("=")
        if not equals or name not in names:
            raise UsageError(f"--weight {word}: must be LINK=SHARE; links are {', '.join(sorted(names))}")
        weights[name] = float(_SHARE.convert(share, None, None))
    return weights
