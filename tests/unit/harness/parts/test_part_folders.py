"""A part that is a folder can be removed: nothing but the registry names it, and its bounds are then unknown."""

import ast
from pathlib import Path

import pytest
from house import HOUSE
from judged_runs import plan_of
from lost_evidence import files_of, ledger_of
from recorded_runs import RUNS
from synthetic_run import synthetic_run

from faultbed.harness import judge
from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.experiment.metrics import METRICS
from faultbed.harness.ledger.claims import Unknown
from faultbed.harness.ledger.sealed import Sealed
from faultbed.harness.parts import registry
from faultbed.harness.parts.part import Planned
from faultbed.harness.verdict import Verdict

FOLDERS = sorted(path.parent.name for path in Path(HOUSE, "harness", "parts").glob("*/__init__.py"))


def importers_of(package: str) -> set[str]:
    """Return the modules outside a package that import it."""
    return {
        str(path.relative_to(HOUSE))
        for floor in ("harness", "bench")
        for path in (HOUSE / floor).rglob("*.py")
        if package.replace(".", "/") not in f"faultbed/{path.relative_to(HOUSE)}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package)
    }


@pytest.mark.parametrize("name", FOLDERS)
def test_only_the_registry_imports_the_folder_of_a_part(name):
    assert importers_of(f"faultbed.harness.parts.{name}") == {"harness/parts/registry.py"}


def test_loop_of_a_run_names_no_part():
    """Faults are what a run is about: the loop hands them to whatever drives them, and clears them after Ctrl-C."""
    names = set(FOLDERS) - {"faults"}
    for module in ("loop.py", "run_record.py", "lease_watch.py"):
        assert names & words_of(Path(HOUSE, "harness", "run", module)) == set(), module
    assert "twin" in words_of(Path(HOUSE, "harness", "parts", "twin", "twin_part.py"))


def words_of(path):
    """Return the identifiers and strings of a module, without its docstrings."""
    tree = ast.parse(path.read_text())
    words = {getattr(node, field, None) for node in ast.walk(tree) for field in ("id", "attr", "name", "arg", "value")}
    return {word for word in words if isinstance(word, str)}


@pytest.mark.parametrize("name", FOLDERS)
def test_verdict_of_a_run_without_a_part_needs_nothing_of_it(monkeypatch, name):
    """What the part would have claimed is not claimed; every other claim keeps its status, or is unknown."""
    whole = ledger_of(RUNS["collective"], files_of(RUNS["collective"])).statuses
    monkeypatch.setattr(judge, "PARTS", tuple(part for part in registry.PARTS if part.name != name))
    recorded = RUNS["collective"]
    files = {place: one for place, one in files_of(recorded).items() if place[1] is not judge.KINDS.get(name)}
    rest = ledger_of(recorded, files).statuses
    assert rest.keys() <= whole.keys()
    assert [one for one, status in rest.items() if status != whole[one] and not isinstance(status, Unknown)] == []


def test_run_without_the_part_of_a_bystander_leaves_its_bounds_unknown(monkeypatch):
    monkeypatch.setattr(judge, "PARTS", tuple(part for part in registry.PARTS if part.name != "bystander"))
    run, sealed = synthetic_run(), Sealed()
    expected = [Expectation(metric=METRICS["bystander.gap"], maximum=9.0)]
    judged = judge.judge(
        before=Planned(plan=plan_of(run), expectations=expected),
        run=run,
        observed=judge.observed_of(run, sealed),
        sealed=sealed,
    )
    (check,) = [check for check in judged.verdict.checks if check.name == "bystander.gap"]
    assert check.verdict is judged.verdict.verdict is Verdict.INCONCLUSIVE


def test_importers_of_finds_an_importer():
    assert "harness/run/loop.py" in importers_of("faultbed.harness.parts.registry")
