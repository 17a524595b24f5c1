"""A part that is a folder can be removed: nothing but the registry names it, and its bounds are then unknown."""

import ast
from pathlib import Path

import pytest
from house import HOUSE
from judged_runs import plan_of
from synthetic_run import synthetic_run

from faultbed.harness import judge
from faultbed.harness.experiment.experiment_file import Expectation
from faultbed.harness.experiment.metrics import METRICS
from faultbed.harness.ledger.sealed import Sealed
from faultbed.harness.parts import registry
from faultbed.harness.parts.part import Planned
from faultbed.harness.verdict import Verdict

REMOVABLE = ("bystander", "capture", "probes")


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


@pytest.mark.parametrize("name", REMOVABLE)
def test_only_the_registry_imports_the_folder_of_a_part(name):
    assert Path(HOUSE, "harness", "parts", name).is_dir()
    assert importers_of(f"faultbed.harness.parts.{name}") == {"harness/parts/registry.py"}


def test_run_without_the_part_of_a_bystander_leaves_its_bounds_unknown(monkeypatch):
    rest = tuple(part for part in registry.PARTS if part.name not in REMOVABLE)
    monkeypatch.setattr(judge, "PARTS", rest)
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
