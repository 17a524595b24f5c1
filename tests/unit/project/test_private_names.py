"""Tests use few private names of the product. A test of one breaks when nothing changes that a user sees."""

import ast
from collections.abc import Iterator

import pytest
from house import HOUSE

MOST = 164
"""How often tests import or read a private name of the product. Lower it with every one that goes; never raise it."""


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def private_names(tree: ast.Module) -> Iterator[str]:
    """Yield each private name that a test imports from `faultbed`, or reads from something that it has imported."""
    ours = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "faultbed":
            ours |= {alias.asname or alias.name for alias in node.names}
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Import):
            ours |= {alias.asname for alias in node.names if alias.asname and alias.name.startswith("faultbed.")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ours:
            yield from [node.attr] if is_private(node.attr) else []


def test_tests_use_no_more_private_names_than_before():
    found = [
        f"{path.relative_to(HOUSE)}: {name}"
        for path in sorted((HOUSE / "tests").rglob("*.py"))
        for name in private_names(ast.parse(path.read_text()))
    ]
    assert len(found) <= MOST, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from faultbed.a import _b, c", ["_b"]),
        ("from faultbed import a\na._b()", ["_b"]),
        ("import faultbed.a as m\nm._b = 1", ["_b"]),
        ("from faultbed.a import C\nC._b", ["_b"]),
        ("from other import a, _c\na._b\nself._d", []),
        ("from faultbed import a\na.__doc__", []),
    ],
)
def test_private_name_check_sees_imports_and_attributes(source, names):
    assert list(private_names(ast.parse(source))) == names
