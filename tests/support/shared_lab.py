"""A lab that consists of its fingerprint only, in a file that several processes read and write.

python shared_lab.py FOLDER WHY     begin to work on it; a line on stdin ends that, and the outcome is printed
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from house import HOUSE

from faultbed.testbed.observe import fingerprint
from faultbed.testbed.observe.fingerprint import Fingerprint
from faultbed.testbed.tenancy import dirty
from faultbed.testbed.tenancy.reservation import WHOLE_LAB

CLEAN = {"host1": {"link be0": "UP"}, "host2": {"link be0": "UP"}}


def change(folder: Path, node: str, text: str) -> None:
    """Change one link's state."""
    result = look(folder)
    write(folder, {**result, node: {"link be0": text}})


def look(folder: Path) -> dict[str, dict[str, str]]:
    """Return the fingerprint of the lab."""
    return json.loads((folder / "world").read_text())


def write(folder: Path, nodes: dict[str, dict[str, str]]) -> None:
    """Replace the lab's state atomically for all its readers."""
    (folder / "world.new").write_text(json.dumps(nodes))
    (folder / "world.new").replace(folder / "world")


def lab_at(folder: Path, *, settle_s: float = 0.0) -> SimpleNamespace:
    """Return the lab in `folder`. A difference counts after `settle_s`, and one look without a difference is enough."""
    if not (folder / "world").exists():
        write(folder, CLEAN)

    def capture(lab):
        nodes = {
            name: facts for name, facts in look(folder).items() if name in lab.reserved or WHOLE_LAB in lab.reserved
        }
        return Fingerprint(nodes=nodes, covers=lab.reserved, heard_s=60.0)

    fingerprint.capture = capture
    fingerprint.SETTLE_S = settle_s
    return SimpleNamespace(name="shared", kind="rack", state_dir=folder, topology=None, reserved=("*",))


class Command:
    """A process that works on the lab in `folder`."""

    def __init__(self, folder: Path, why: str) -> None:
        path = os.pathsep.join((str(HOUSE), str(Path(__file__).parent)))
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(folder), why],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        self.said = self.process.stdout.readline().strip()

    def end(self) -> dict[str, str]:
        """Let the process end, and return the outcome."""
        out, _ = self.process.communicate("end\n", timeout=60)
        return json.loads(out)

    def kill(self) -> None:
        """Kill the process with SIGKILL and wait for its end."""
        self.process.kill()
        self.process.communicate(timeout=60)


if __name__ == "__main__":
    lab = lab_at(Path(sys.argv[1]))
    work = dirty.begin(lab, sys.argv[2], lease_s=0.0)
    print("begun", flush=True)
    sys.stdin.readline()
    outcome = dirty.end(lab, work)
    print(json.dumps({"state": outcome.state, "reasons": outcome.reasons, "said": outcome.sentence}))
