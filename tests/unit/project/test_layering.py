"""The packages form three layers, and imports only go down."""

import ast
import collections
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from house import HOUSE

FLOORS = {
    "testbed": set(),
    "inject": {"testbed"},
    "traffic": {"testbed"},
    "harness": {"testbed", "inject", "traffic"},
    "bench": {"testbed", "inject", "traffic", "harness"},
}
PRODUCT = [floor for floor in FLOORS if floor != "bench"]
ROOMS = (
    "ledger",
    "experiment",
    "packets",
    "record",
    "model",
    "analysis",
    "attribution",
    "live",
    "parts",
    "report",
    "run",
    "scorecard",
    "fuzz",
    "pytest_plugin",
    "cli",
)
MODULES_MAX = 14
FAMILY = "a family of fault kinds has one file among the kinds and one among the mechanisms of each backend"
SHARED_NAMES = {
    **dict.fromkeys(("congestion", "gpu", "host", "link", "packet", "processes", "rnic", "switch"), FAMILY),
    "storage": f"{FAMILY}; `faultbed.traffic.node.storage` is a process that faults find by that name",
}
FAMILY_FOLDERS = ("inject/kinds", "inject/mechanisms/soft", "inject/mechanisms/rack")
ON_THE_NODE = {"pyverbs", "numpy", "nftables", "pynvml"}


@functools.cache
def imports_of(path: Path) -> tuple[tuple[str, bool], ...]:
    """Modules that a file imports, and whether only for type checking."""
    return tuple(_imports_of(path))


def _imports_of(path: Path) -> Iterator[tuple[str, bool]]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    for_types = {
        id(inner)
        for node in nodes
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in for_types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative imports hide which floor they reach"
            yield node.module, id(node) in for_types


def floor_of(module: str) -> str:
    """Return the floor of a module: "inject" of faultbed.inject.heal."""
    return module.removeprefix("faultbed.").partition(".")[0]


def files(package: str) -> list[Path]:
    return sorted((HOUSE / package).rglob("*.py"))


@pytest.mark.parametrize("package", FLOORS)
def test_packages_import_only_downwards(package):
    """A package imports itself and the layers below it; the two packages of the middle layer never import each
    other."""
    wrong = [
        f"{path.relative_to(HOUSE)} imports {module}"
        for path in files(package)
        for module, _ in imports_of(path)
        if floor_of(module) in FLOORS.keys() - FLOORS[package] - {package}
    ]
    assert not wrong


def test_harness_packages_import_only_downwards():
    """Packages of the harness import only packages before them; loose modules beside them are shared by all."""
    rooms = {path.name for path in (HOUSE / "harness").iterdir() if (path / "__init__.py").exists()}
    assert rooms == set(ROOMS)
    wrong = [
        f"{path.relative_to(HOUSE)} imports {module}"
        for above, room in enumerate(ROOMS)
        for path in files(f"harness/{room}")
        for module, _ in imports_of(path)
        if module.startswith("faultbed.harness.") and module.split(".")[2] in ROOMS[above + 1 :]
    ]
    assert not wrong


def test_package_has_at_most_fourteen_loose_modules():
    """The 15th module beside a package's subpackages becomes part of a new package."""
    loose = collections.Counter(
        str(path.parent.relative_to(HOUSE)) for floor in FLOORS for path in files(floor) if path.name != "__init__.py"
    )
    assert {folder: count for folder, count in loose.items() if count > MODULES_MAX} == {}


def test_module_file_names_are_unique():
    """Two modules share a file name only for a reason listed in `SHARED_NAMES`, and no listed name is unused."""
    places = collections.defaultdict(list)
    for floor in PRODUCT:
        for path in files(floor):
            if path.stem not in {"__init__", "__main__"}:
                places[path.stem].append(str(path.parent.relative_to(HOUSE)))
    shared = {name: folders for name, folders in places.items() if len(folders) > 1}
    assert shared.keys() == SHARED_NAMES.keys()
    others = [folder for folders in shared.values() for folder in folders if folder not in FAMILY_FOLDERS]
    assert others == ["traffic/node"]


@pytest.mark.parametrize("package", ["faultbed.inject.node", "faultbed.testbed.node", "faultbed.traffic.node"])
def test_node_code_imports_only_what_a_node_has(package):
    """Node-side code imports the standard library, the node's own packages and itself: nothing of the controller."""
    wrong = [
        f"{path.relative_to(HOUSE)} imports {module}"
        for path in files(package.replace(".", "/"))
        for module, _ in imports_of(path)
        if module.partition(".")[0] not in sys.stdlib_module_names | ON_THE_NODE
        and not f"{module}.".startswith((f"{package}.", "faultbed.testbed.node."))
    ]
    assert not wrong


def test_layering_check_sees_a_forbidden_import(tmp_path):
    """The function that the tests above use finds plain, from-, nested and type-only imports."""
    bad = tmp_path / "bad.py"
    bad.write_text(
        "import faultbed.harness.run.loop\nfrom faultbed.inject import plan\ndef f():\n    import faultbed.traffic\n"
        "if TYPE_CHECKING:\n    from faultbed.testbed.lab import Lab\n"
    )
    assert set(imports_of(bad)) == {
        ("faultbed.harness.run.loop", False),
        ("faultbed.inject", False),
        ("faultbed.traffic", False),
        ("faultbed.testbed.lab", True),
    }


@pytest.mark.process
def test_command_does_not_import_plotting_and_packet_libraries():
    """matplotlib, pyarrow and scapy take seconds to import; only code that needs one of them imports it."""
    code = "import sys, faultbed.harness.cli, faultbed.harness.pytest_plugin.hooks; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=HOUSE)
    assert not {"matplotlib", "pyarrow", "scapy"} & set(done.stdout.split())


def test_unit_tests_lie_in_the_folder_of_their_package():
    """A folder that mirrors a package has tests of that package; `project` has those of the project itself."""
    unit = HOUSE / "tests" / "unit"
    loose = [path.name for path in unit.glob("test_*.py")]
    assert not loose, "move each to the folder of the package that it tests"
    folders = {path.parent.relative_to(unit).as_posix() for path in unit.rglob("test_*.py")} - {"project"}
    assert [folder for folder in sorted(folders) if not (HOUSE / folder).is_dir()] == []
