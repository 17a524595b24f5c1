"""Every wait for a machine, a thread or a process has a deadline: no call in the product waits for ever.

A wait without a deadline is the reason why a command does not answer Ctrl-C (`faultbed.testbed.stopping`).
"""

from __future__ import annotations

import ast

import pytest
from house import HOUSE

PACKAGES = ("testbed", "inject", "traffic", "harness")
# Call -> the position of its timeout among the arguments; without one it waits as long as it takes.
TIMEOUT_AT = {"wait": 0, "join": 0, "result": 0, "exception": 0, "communicate": 1, "wait_for": 1}
NEEDS_KEYWORD = {"run", "check_call", "check_output", "call"}
NEVER = {"ThreadPoolExecutor", "ProcessPoolExecutor", "recv_exit_status"}
"""An executor waits for its threads at its end, and at the end of the process (`faultbed.testbed.side_by_side`)."""
MARK = "# deadline: "
"""Begins the comment of a call that cannot wait, with the reason."""


def waits(text: str) -> list[int]:
    """Return the lines of calls that may wait for ever."""
    lines = text.splitlines()
    return sorted(
        node.lineno
        for node in ast.walk(ast.parse(text))
        if _may_wait(node) and MARK not in lines[node.end_lineno - 1] and MARK not in lines[node.lineno - 1]
    )


def _may_wait(node: ast.AST) -> bool:
    if isinstance(node, ast.With):
        return any(_name(item.context_expr) == "Popen" for item in node.items)  # its end waits for the process
    if isinstance(node, ast.Attribute | ast.Name) and _last(node) in NEVER:
        return True
    if not isinstance(node, ast.Call):
        return False
    name, keywords = _name(node), {word.arg: word.value for word in node.keywords}
    if None in keywords:  # **options
        return False
    timeout = next((keywords[key] for key in ("timeout", "timeout_s") if key in keywords), None)
    if isinstance(node.func, ast.Attribute) and name in TIMEOUT_AT:
        at = TIMEOUT_AT[name]
        given = node.args[at] if len(node.args) > at else timeout
        return given is None or (isinstance(given, ast.Constant) and given.value is None)
    is_subprocess = isinstance(node.func, ast.Attribute) and _last(node.func.value) == "subprocess"
    return is_subprocess and name in NEEDS_KEYWORD and timeout is None


def _name(node: ast.AST) -> str:
    return _last(node.func) if isinstance(node, ast.Call) else ""


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def test_no_call_of_the_product_waits_for_ever():
    found = [
        f"{path.relative_to(HOUSE)}:{line}"
        for package in PACKAGES
        for path in sorted((HOUSE / package).rglob("*.py"))
        for line in waits(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "process.wait()",
        "event.wait(None)",
        "event.wait(timeout=None)",
        "self._thread.join()",
        "future.result()",
        "process.communicate(data)",
        "condition.wait_for(ready)",
        "subprocess.run(['true'], check=True)",
        "pool = ThreadPoolExecutor()",
        "list(futures.ThreadPoolExecutor().map(work, items))",
        "with subprocess.Popen(['true']) as child: pass",
        "status = session.recv_exit_status()",
    ],
)
def test_wait_without_a_deadline_is_found(line):
    assert waits(line) == [1]


@pytest.mark.parametrize(
    "line",
    [
        "process.wait(timeout=5)",
        "event.wait(left_s)",
        "thread.join(2.0)",
        "future.result(deadline.step_s)",
        "process.communicate(data, timeout=5)",
        "process.communicate(data, 5)",
        "condition.wait_for(ready, timeout=3)",
        "subprocess.run(['true'], check=True, timeout=5)",
        "', '.join(names)",
        "session.recv_exit_status()  # deadline: it has come",
    ],
)
def test_wait_with_a_deadline_is_not(line):
    assert waits(line) == []
