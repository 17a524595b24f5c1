"""What a command that runs something does to a soft lab that is down: bring it up, or refuse, and end it afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import click

from faultbed.testbed import shipped
from faultbed.testbed.backends.lab_backend import backend_of
from faultbed.testbed.backends.soft import lifecycle
from faultbed.testbed.errors import LabError, UsageError
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.model.lab_kind import traits_of

__all__ = ["brought_up", "down_option", "no_up_option"]

no_up_option = click.option("--no-up", is_flag=True, help="Refuse a soft lab that is down, instead of bringing it up.")
down_option = click.option("--down", "end_lab", is_flag=True, help="End the soft lab afterwards, for CI.")


@contextlib.contextmanager
def brought_up(inventory: Inventory, progress: Callable[[str], None], *, no_up: bool, end_lab: bool) -> Iterator[None]:
    """Bring a soft lab up if it is down, and say so; with `end_lab`, end it after the block in any case.

    Raises:
        UsageError: `end_lab` on a rack lab, which is not ours to end.
        LabError: the lab is down, and `no_up` was given; or it does not come up.
    """
    name = shipped.inventory_word(inventory.path)
    if not traits_of(inventory.kind).has_snapshot:
        if end_lab:
            raise UsageError(f"--down: {inventory.name} is a rack lab, which faultbed does not end; leave it out")
        backend_of(inventory.kind).make_ready(inventory, progress)
        yield
        return
    state = lifecycle.status(inventory).state
    if state.startswith("down"):
        if no_up:
            raise LabError(f"{inventory.name} is down, and --no-up was given; `faultbed --lab {name} up` starts it")
        takes = "seconds, from its snapshot" if "snapshot" in state else "minutes the first time"
        after = "" if end_lab else f"; it stays up (`faultbed --lab {name} down`, or --down, ends it)"
        progress(f"{inventory.name} is down: bringing it up, which takes {takes}{after}")
    try:
        backend_of(inventory.kind).make_ready(inventory, progress)
        yield
    finally:
        if end_lab:
            progress(f"ending {inventory.name} (--down)")
            backend_of(inventory.kind).down(inventory)
