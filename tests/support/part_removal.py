"""Remove a part of the experiments from a copy of the checkout, and see whether the rest stands without it.

    python tests/support/part_removal.py telemetry capture [--tests tests/unit]

The part's folder and its lines in the registry are deleted. Then ruff and mypy run on the product, all tests are
collected, and those of `--tests` run. A test module that imports the part itself is one of its own.
"""

from __future__ import annotations

import argparse
import ast
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HOUSE = Path(__file__).resolve().parents[2]
REGISTRY = Path("harness", "parts", "registry.py")
TIMEOUT_S = 3600.0


def copied_to(folder: Path) -> None:
    """Copy what git knows of the checkout, with local changes, into a folder."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=HOUSE, capture_output=True, check=True, timeout=60).stdout
    for name in filter(None, listed.decode().split("\0")):
        source, target = HOUSE / name, folder / name
        if source.is_symlink() or source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def without(registry: str, name: str) -> str:
    """Return the registry without the lines of a part: those of its import and its entry.

    Raises:
        ValueError: it has no such part.
    """
    lines = registry.splitlines(keepends=True)
    own = [line for line in lines if f"faultbed.harness.parts.{name} import" in line or line.strip() == f"{name}_part,"]
    if len(own) != 2:
        raise ValueError(f"{name}: no part with a folder; choose one of harness/parts")
    return "".join(line for line in lines if line not in own)


def own_tests(folder: Path, name: str) -> set[str]:
    """Return the test modules that need a part: by an import of it, or of a helper that imports it."""
    package = f"faultbed.harness.parts.{name}"
    imports = {path: imported_by(path) for path in (folder / "tests").rglob("*.py")}
    needing = {path for path, names in imports.items() if any(f"{one}.".startswith(f"{package}.") for one in names)}
    while more := {path for path, names in imports.items() if names & {one.stem for one in needing}} - needing:
        needing |= more
    return {str(path.relative_to(folder)) for path in needing}


def imported_by(path: Path) -> set[str]:
    """Return the modules that a file imports, and the names that it imports from packages."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def without_part(folder: Path, name: str, tests: list[str]) -> list[str]:
    """Remove a part in a copy of the checkout, and return a line for each check."""
    copied_to(folder)
    shutil.rmtree(folder / "harness" / "parts" / name)
    registry = folder / REGISTRY
    registry.write_text(without(registry.read_text(), name))
    own = own_tests(folder, name)
    for module in own:
        (folder / module).unlink()
    checks = {
        "ruff": ["ruff", "check", "-q", "harness"],
        "mypy": ["mypy"],
        "collect": ["pytest", "tests/unit", "--collect-only", "-q", "-p", "no:cacheprovider"],
        **({"tests": ["pytest", *tests, "-q", "-p", "no:cacheprovider"]} if tests else {}),
    }
    lines = [f"{name}: {len(own)} test modules need it"]
    for check, words in checks.items():
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
        said = [line for line in done.stdout.splitlines() if line.strip()]
        lines.append(f"{name}: {check} {'ok' if done.returncode == 0 else f'exit {done.returncode}'}: {said[-1:]}")
        lines += [f"    {line}" for line in said if "error:" in line or line.startswith(("ERROR", "FAILED"))]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", help="folders of harness/parts")
    parser.add_argument("--tests", nargs="*", default=[], help="tests to run without the part")
    chosen = parser.parse_args()
    is_complete = True
    for name in chosen.names:
        with tempfile.TemporaryDirectory() as folder:
            for line in without_part(Path(folder), name, chosen.tests):
                is_complete &= ": exit" not in line and " exit " not in line
                print(line, flush=True)
    return 0 if is_complete else 1


if __name__ == "__main__":
    raise SystemExit(main())
