"""A lab without VMs: only processes beside QEMU exist. For commands that are killed in the middle of a fault.

python local_lab.py FOLDER [WORD...]     `faultbed inject WORD...` on it; default: link.flap host1:rxe0 --for 60s
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

from faultbed.harness.cli import ending
from faultbed.harness.cli.context import Session
from faultbed.harness.cli.experiments import faults
from faultbed.testbed.inventory.lab_inventory import load
from faultbed.testbed.observe import counters, fingerprint
from faultbed.testbed.observe.fingerprint import Fingerprint
from faultbed.testbed.shipped import inventories
from faultbed.testbed.tenancy.reservation import WHOLE_LAB

SOFT = load(inventories() / "soft.yml")


def counters_of(changes: int) -> dict[str, dict[str, int]]:
    """Return counters of all RNICs: all are 0, and the first carrier is on and has changed `changes` times."""
    still = {host.name: {f"{rnic.name}.send_err": 0 for rnic in host.rnics} for host in SOFT.topology.hosts}
    return {**still, "host1": {**still["host1"], "be0.carrier": 1, "be0.carrier_changes": changes}}


def lab_at(folder: Path) -> SimpleNamespace:
    """Return a lab whose QMP socket is `folder`/qmp; by its counters the carrier was lost and is back.

    No host has a queue pair.
    """
    changes = itertools.count()
    counters.read = lambda *_, **__: counters_of(next(changes))
    fingerprint.capture = lambda lab: Fingerprint(
        nodes={"host1": {"link be0": (lab.state_dir / "link").read_text()}}, heard_s=60.0
    )
    return SimpleNamespace(
        inventory_model=SOFT, topology=SOFT.topology, name="soft", kind="soft", state_dir=folder,
        qmp_socket=lambda _: folder / "qmp", nic_id=lambda _, netdev: f"nic-{netdev}", guard=lambda: None,
        heartbeat=lambda: None, reserved=(WHOLE_LAB,), scheme=None, request=lambda *_, **__: {"rnics": []},
    )  # fmt: skip


class Here(Session):
    """A session of the command line on the lab in a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Path("soft"))
        self._folder = folder

    @contextlib.contextmanager
    def working(self, *_, **__):
        yield lab_at(self._folder)


if __name__ == "__main__":
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell that starts the tests in the background makes them ignore it
    words, here = sys.argv[2:] or ["link.flap", "host1:rxe0", "--for", "60s"], Here(Path(sys.argv[1]))
    ending.end_with(SimpleNamespace(main=lambda **options: faults.inject.main(words, obj=here, **options)), "faultbed")
