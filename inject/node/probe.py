"""Report whether this machine supports faults: every actuator checks its target, and changes nothing.

Reads a JSON list of `{"actuator": NAME, "args": {..}}` from stdin and writes one JSON line for each, in their order:
`{"able": true}`, or `{"able": false, "why": "..."}` with what is missing and which target to use instead.
"""

from __future__ import annotations

import json
import os
import sys

from faultbed.inject.node.actuator import Refused, make

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from typing import Any

__all__ = ["OLDEST", "able", "in_a_child", "main"]

OLDEST = (3, 9)
"""Python of Debian bullseye, the oldest that node code supports. SONiC 202111 to 202311 have it."""


def able(request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request: whether the actuator's `prepare` accepts the target."""
    if sys.version_info < OLDEST:
        return {"able": False, "why": f"Python {sys.version.split()[0]} here: faults need 3.9 (SONiC 202111) or later"}
    try:
        actuator = make(str(request["actuator"]), request["args"])
        try:
            actuator.prepare()
        finally:
            actuator.close()
    except FileNotFoundError as error:
        return {"able": False, "why": f"there is no {error.filename} here; choose another target"}
    except (Refused, OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
        return {"able": False, "why": f"{error}" or type(error).__name__}
    return {"able": True}


def in_a_child(request: dict[str, Any]) -> str:
    """Return the answer to a request as JSON. A child process computes it, because some actuators enter namespaces."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.write(write, json.dumps(able(request)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as answer:
        output = answer.read()
    os.waitpid(child, 0)
    return output or json.dumps({"able": False, "why": "the check ended unexpectedly; run it again"})


def main() -> None:
    """Answer every request of stdin."""
    for request in json.load(sys.stdin):
        sys.stdout.write(in_a_child(request) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
