"""Importing node code reads and opens nothing: forks of a warm parent share what its imports have made."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
PURE = {
    "struct.Struct", "re.compile", "frozenset", "tuple", "range", "bytes", "str", "len", "Rule", "json.JSONEncoder",
    "functools.cache", "np.tile", "np.arange", "np.uint32", "sys.modules.setdefault", "vars", "ctypes.POINTER",
    "namedtuple",
}  # fmt: skip
PURE_METHODS = {"values", "items", "to_bytes", "startswith", "endswith"}


def _calls_at_import(node):
    """Yield the calls that importing a module makes: not those in functions, nor in `if __name__ == "__main__"`."""
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        children = [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
    elif isinstance(node, ast.If) and (
        "__name__" in ast.unparse(node.test) or "TYPE_CHECKING" in ast.unparse(node.test)
    ):
        children = node.orelse
    else:
        children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Call):
        yield node
    for child in children:
        yield from _calls_at_import(child)


def impure(source):
    return [
        ast.unparse(call)
        for call in _calls_at_import(ast.parse(source))
        if ast.unparse(call.func) not in PURE
        and not (isinstance(call.func, ast.Attribute) and call.func.attr in PURE_METHODS)
    ]


@pytest.mark.parametrize(
    "path",
    sorted(
        path.relative_to(ROOT)
        for part in ("inject", "testbed", "traffic")
        for path in (ROOT / part / "node").rglob("*.py")
    ),
    ids=str,
)
def test_importing_node_code_reads_and_opens_nothing(path):
    """What a module has read at its import, a fork of the warm parent has from before the snapshot."""
    assert impure((ROOT / path).read_text()) == []


@pytest.mark.parametrize(
    "source",
    ["import time\nSTART = time.time()", "import os\nclass A:\n  pid = os.getpid()", "def f(x=open('/dev/null')): ..."],
)
def test_module_that_reads_something_at_its_import_is_found(source):
    assert impure(source)
