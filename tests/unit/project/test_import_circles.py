"""No module imports itself by a detour, and fewer packages do so than before."""

import ast
import functools
from collections import defaultdict
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

import pytest
from house import HOUSE

PRODUCT = ("testbed", "inject", "traffic", "harness")

TYPE_CIRCLES = [
    {"harness.packets.analysis", "harness.packets.doubts"},
    {"inject.injector", "inject.prepared_fault"},
    {
        "testbed.backends.lab_backend",
        "testbed.lab",
        "testbed.observe.counters",
        "testbed.observe.link_state",
        "testbed.observe.watcher",
    },
    {"testbed.node.settings", "testbed.node.state"},
    {"traffic.node.flows.late", "traffic.node.task"},
    {"traffic.node.ranks.lane", "traffic.node.ranks.recorder"},
    {"traffic.workloads.elastic.driver", "traffic.workloads.elastic.finish"},
]
"""Circles of modules that exist for a type checker alone. The list only gets shorter."""

PACKAGE_CIRCLES = {
    "harness": [{"ledger", "verdict"}],
    "harness.analysis": [{"effects", "intervals", "observations", "resolutions", "restarts"}],
    "harness.experiment": [
        {
            "bystander_file",
            "declare",
            "experiment_file",
            "fabric_file",
            "job_sections",
            "program",
            "rank_fields",
            "replayed",
            "workload_file",
        }
    ],
    "harness.run": [{"repeats", "sweeps"}],
    "inject": [{"evidence", "kinds", "mechanisms"}],
    "testbed": [{"backends", "lab", "observe", "provision", "tenancy"}],
    "traffic": [{"flows", "probes"}],
    "traffic.node": [{"flows", "task"}],
}
"""Circles at run time between the modules and packages of one package. The list only gets shorter."""

Graph = Mapping[str, set[str]]


@functools.cache
def sources():
    """Return the syntax tree of every module of the product, by its name without `faultbed`."""
    paths = [path for package in PRODUCT for path in (HOUSE / package).rglob("*.py")]
    names = {path: ".".join(path.relative_to(HOUSE).with_suffix("").parts).removesuffix(".__init__") for path in paths}
    return {name: ast.parse(path.read_text()) for path, name in names.items()}


def imported(tree, known, *, for_types):
    """Return the modules of `known` that a tree imports: for a type checker alone only with `for_types`."""
    typed = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    names = set()
    for node in ast.walk(tree):
        if id(node) in typed and not for_types:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            are_known = {name for name in submodules if name.removeprefix("faultbed.") in known}
            names |= are_known or {node.module}
    return {name.removeprefix("faultbed.") for name in names} & known


@functools.cache
def imports(*, for_types):
    trees = sources()
    return {name: imported(tree, trees.keys(), for_types=for_types) - {name} for name, tree in trees.items()}


def circles(graph: Graph):
    """Return the sets of nodes that reach each other, in the order of their names."""
    found = []
    graph = {node: set(after) for node, after in graph.items()}
    while True:
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            start = error.args[1][0]
            circle = reached(graph, start) & reached(reverse(graph), start)
            found.append(circle)
            graph = {node: after - circle for node, after in graph.items() if node not in circle}
        else:
            return sorted(found, key=min)


def reached(graph: Graph, start):
    """Return every node that can be reached from one, itself included."""
    seen, left = set(), [start]
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            left += graph.get(node, ())
    return seen


def reverse(graph: Graph):
    turned = defaultdict(set)
    for node, after in graph.items():
        for other in after:
            turned[other].add(node)
    return turned


def siblings(graph: Graph, package):
    """Return the imports between the modules and packages directly in one package."""
    inside = defaultdict(set)
    prefix = f"{package}."
    for module, after in graph.items():
        for other in after:
            if module.startswith(prefix) and other.startswith(prefix):
                child, other_child = (name.removeprefix(prefix).partition(".")[0] for name in (module, other))
                inside[child] |= {other_child} - {child}
    return inside


def test_modules_import_no_circle_at_run_time():
    """Imports inside functions count, too: they hide a circle instead of ending it."""
    assert circles(imports(for_types=False)) == []


def test_modules_import_no_new_circle_for_types():
    assert circles(imports(for_types=True)) == TYPE_CIRCLES


def test_packages_import_no_new_circle():
    graph = imports(for_types=False)
    packages = sorted({name.rpartition(".")[0] for name in graph if "." in name})
    found = {package: circles(siblings(graph, package)) for package in packages}
    assert {package: rings for package, rings in found.items() if rings} == PACKAGE_CIRCLES


@pytest.mark.parametrize(
    ("source", "plain", "typed"),
    [
        ("import faultbed.a.b", {"a.b"}, {"a.b"}),
        ("from faultbed.a import b, other", {"a.b"}, {"a.b"}),
        ("from faultbed.a.b import name", {"a.b"}, {"a.b"}),
        ("def f():\n    from faultbed.a import b", {"a.b"}, {"a.b"}),
        ("if TYPE_CHECKING:\n    from faultbed.a import b", set(), {"a.b"}),
    ],
)
def test_circle_check_sees_every_form_of_import(source, plain, typed):
    tree = ast.parse(source)
    assert [imported(tree, {"a", "a.b"}, for_types=with_types) for with_types in (False, True)] == [plain, typed]


def test_circle_check_finds_separate_and_joined_circles():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert circles(graph) == [{"a", "b", "c"}, {"d", "e"}]
    assert circles({"a": {"b"}, "b": set()}) == []
