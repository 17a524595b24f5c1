"""Whether faults could be done on this machine: every actuator looks as it would before a fault, and changes nothing.

A JSON list of `{"actuator": NAME, "args": {..}}` on stdin; on stdout one JSON line for each, in their order:
`{"able": true}`, or `{"able": false, "why": "..."}` with what is missing and where to aim instead.
"""

from __future__ import annotations

import json
import os
import sys

from inject.node.actuator import Refused, make

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from typing import Any

__all__ = ["OLDEST", "able", "in_a_child", "main"]

OLDEST = (3, 9)
"""Python of Debian bullseye: the oldest that node code runs under. SONiC has it from 202111 to 202311."""


def able(request: dict[str, Any]) -> dict[str, Any]:
    """Look once as the fault's holder would."""
    if sys.version_info < OLDEST:
        return {"able": False, "why": f"Python {sys.version.split()[0]} here: faults need 3.9 (SONiC 202111) or later"}
    try:
        actuator = make(str(request["actuator"]), request["args"])
        try:
            actuator.prepare()
        finally:
            actuator.close()
    except FileNotFoundError as error:
        return {"able": False, "why": f"there is no {error.filename} here: this target cannot do it"}
    except (Refused, OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
        return {"able": False, "why": f"{error}" or type(error).__name__}
    return {"able": True}


def in_a_child(request: dict[str, Any]) -> str:
    """Return the answer as JSON, from a child process: some actuators enter namespaces, or hold sockets."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.write(write, json.dumps(able(request)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said or json.dumps({"able": False, "why": "the look ended in the middle"})


def main() -> None:
    """Answer all of stdin."""
    for request in json.load(sys.stdin):
        sys.stdout.write(in_a_child(request) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
