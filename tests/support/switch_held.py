"""The holder of a routing scheme as a real process in a network namespace: it follows BGP, and ends with us.

python switch_held.py FOLDER [KILLS]     prints what happened as JSON; run by `unshare -rn`
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from subprocess import PIPE

from switch_namespace import HOP, P2, P3, SCHEMES, both, ip, make_switch, seen
from waiting import until

EVERY_S = 0.002
UNPLACED = {**SCHEMES["static"], "rules": []}
PLACED = [[[1000, 1001, P2, 0, "far1"], [1000, 1002, P3, 0, "far1"]]]
MOVED = [[[1000, 1002, P2, 0, "far1"], [1000, 1001, P3, 0, "far1"]]]


class Controller:
    """The controller's end of the channel."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.process = subprocess.Popen(
            [sys.executable, "-m", "faultbed.inject.node.holder"], stdin=PIPE, stdout=PIPE, text=True
        )
        self.read()

    def read(self) -> dict:
        return json.loads(self.process.stdout.readline())

    def request(self, do: str, **rest) -> dict:
        self.process.stdin.write(json.dumps({"do": do, **rest}) + "\n")
        self.process.stdin.flush()
        return self.read()

    def prepare(self, scheme: str | dict, *, ttl_s: float = 30.0, mutate: str | None = None) -> dict:
        switch = SCHEMES[scheme] if isinstance(scheme, str) else scheme
        return self.request(
            "prepare", id=self.name, actuator="scheme", args={"switches": [switch]}, edges=[[0.0, True]],
            window_s=600.0, ttl_s=ttl_s, revert_dir=str(self.folder), mutate=mutate,
            claim={"paths": [{"path": ["machine", "m", "routing"], "thing": "routing of m"}], "session": self.name},
        )  # fmt: skip

    def end(self) -> int:
        self.process.stdin.close()
        return self.process.wait(timeout=20)


def no_rules() -> bool:
    return seen()["rules"] == []


def killed_while_updating(folder: Path, number: int) -> bool:
    """SIGKILL a holder at a random moment of its updates; return whether its revert and a new one restore the rules."""
    one = Controller(folder, f"updating{number}")
    one.prepare(UNPLACED)
    one.request("arm")

    def kill() -> None:
        time.sleep(random.Random(number).uniform(0, 0.2))
        one.process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        for rules in itertools.cycle((PLACED, MOVED)):
            one.request("update", args={"rules": rules})
    except (OSError, ValueError):
        pass
    killer.join()
    one.process.wait()
    (stored,) = folder.glob(f"{one.name}.revert")
    is_undone = subprocess.run(["sh", str(stored)], check=False).returncode == 0 and no_rules()
    stored.unlink()
    again = Controller(folder, f"again{number}")
    again.prepare(UNPLACED)
    again.request("arm")
    again.request("update", args={"rules": PLACED})
    is_same = sorted(map(rule_of, seen()["rules"])) == sorted(tuple(rule) for rule in PLACED[0])
    again.end()
    return is_undone and is_same and no_rules()


def rule_of(rule: dict) -> tuple:
    return rule["priority"], rule["table"], rule["to"], rule["mark"] or 0, rule["in"] or ""


def main() -> None:
    folder = Path(sys.argv[1])
    make_switch()
    results: dict = {}
    one = Controller(folder, "one")
    results["prepared"] = one.prepare("static")
    results["armed"] = one.request("arm")
    results["stored"] = [path.name for path in folder.glob("*.revert")]
    ip(f"route replace {P2} metric 20 proto bgp {HOP.format(port='up2')}")
    results["lag_s"] = until(lambda: P2 not in seen()["tables"]["1001"], every_s=EVERY_S)
    both(P2)
    until(lambda: P2 in seen()["tables"]["1001"])
    second = Controller(folder, "second")
    results["second"] = second.prepare("marked")
    second.end()
    results["left by eof"] = (one.end(), seen(), [path.name for path in folder.glob("*.revert")])

    silent = Controller(folder, "silent")
    silent.prepare("weighted", ttl_s=0.5)
    silent.request("arm")
    results["silent"] = {"had_rules": not no_rules(), "after_s": until(no_rules, every_s=EVERY_S)}
    silent.end()

    killed = Controller(folder, "killed")
    killed.prepare("resilient")
    killed.request("arm")
    killed.process.kill()
    killed.process.wait()
    (stored,) = folder.glob("killed.revert")
    before = not no_rules()
    code = subprocess.run(["sh", str(stored)], check=False).returncode
    results["killed"] = {"had_rules": before, "code": code, "after": seen()}
    stored.unlink()

    lazy = Controller(folder, "lazy")
    lazy.prepare("static", mutate="noop")
    results["noop"] = lazy.request("arm")
    results["noop cleared"] = lazy.request("clear")
    lazy.end()

    placed = Controller(folder, "placed")
    placed.prepare(UNPLACED)
    results["early update"] = placed.request("update", args={"rules": PLACED})
    results["unplaced"] = placed.request("arm")["readback"]
    results["placed"] = placed.request("update", args={"rules": PLACED})
    results["placed rules"] = [rule_of(rule) for rule in seen()["rules"]]
    results["refused"] = placed.request("update", args={"rules": [[[1000, 1001, P2, 0, "far9"]]]})
    results["too many"] = placed.request("update", args={"rules": [*PLACED, *PLACED]})
    results["still there"] = len(seen()["rules"])
    results["placed by eof"] = (placed.end(), seen()["rules"])
    idle = Controller(folder, "idle")
    idle.prepare(UNPLACED, mutate="noop")
    idle.request("arm")
    results["idle placed"] = idle.request("update", args={"rules": PLACED})
    results["idle rules"] = seen()["rules"]
    idle.request("clear")
    idle.end()
    results["kills"] = [killed_while_updating(folder, number) for number in range(int((sys.argv[2:] or [2])[0]))]
    json.dump(results | {"both": [P2, P3]}, sys.stdout)


if __name__ == "__main__":
    main()
