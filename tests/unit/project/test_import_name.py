"""One import package: every module has one name, which begins with `faultbed.`."""

import ast
import os
import shutil
import subprocess
import sys

import pytest
from house import HOUSE

import faultbed
from faultbed.harness.record import code
from faultbed.testbed import shipped
from faultbed.testbed.remote import node_archive

PARTS = shipped.PARTS


def python(*words, cwd):
    environment = {**os.environ, "PYTHONPATH": str(cwd), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-P", *words], capture_output=True, text=True, check=False, cwd=cwd, env=environment
    )


@pytest.mark.parametrize("part", PARTS)
def test_part_imported_by_its_bare_name_names_the_right_one(part):
    """A checkout is on sys.path, so that `import testbed` would make a second module of each file."""
    done = python("-c", f"import {part}", cwd=HOUSE)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: import faultbed.{part} instead: ")


@pytest.mark.parametrize("folder", [*PARTS, "bench", "tests", "faultbed"])
def test_no_file_imports_a_part_by_its_bare_name(folder):
    """An import inside a string, which a test runs in another process, counts too if it is the whole string."""
    wrong = []
    for path in sorted((HOUSE / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import)
                else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            )  # fmt: skip
            wrong += [f"{path.relative_to(HOUSE)}:{node.lineno}" for name in names if name.split(".")[0] in PARTS]
    assert wrong == []


def test_sources_are_all_python_files_of_the_four_folders():
    """Neither os.walk nor rglob enters a link, so that a search from faultbed/ would find two files."""
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *PARTS, "faultbed"],
        cwd=HOUSE,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    expected = {name.removeprefix("faultbed/") for name in tracked if name.endswith(".py")}
    names = [name for name, _ in shipped.sources()]
    assert {name.removeprefix("faultbed/") for name in names} == {
        name for name in expected if (HOUSE / name).exists() or (HOUSE / "faultbed" / name).exists()
    }
    assert len(names) == len(set(names)) > 600
    assert all(name.startswith("faultbed/") and path.is_file() for name, path in shipped.sources())


def test_digest_of_the_code_covers_every_part():
    """A digest that missed the links would be the same for every version."""
    files = dict(shipped.sources())
    whole = code.digest_of(files.items())
    for part in (*(f"faultbed/{part}/__init__.py" for part in PARTS), "faultbed/__init__.py"):
        assert code.digest_of((name, path) for name, path in files.items() if name != part) != whole


def test_node_archive_is_importable_as_faultbed(tmp_path):
    """The archive contains the package files above the node code, so that a node has the same module names."""
    import io
    import tarfile

    with tarfile.open(fileobj=io.BytesIO(node_archive.archive().content)) as tar:
        names = tar.getnames()
        tar.extractall(tmp_path, filter="data")
    assert {name.split("/")[0] for name in names} == {"faultbed", "pynvml.py"}
    for module in ("faultbed.inject.node.holder", "faultbed.traffic.node.storage", "faultbed.testbed.node.watch"):
        done = python("-c", f"import {module}; print({module}.__file__)", cwd=tmp_path)
        assert done.stdout.startswith(str(tmp_path)), done.stderr


def test_checkout_without_symbolic_links_is_refused_with_one_sentence(tmp_path):
    """Git writes a link as a file with its target where core.symlinks is false; so does an unpacked zip archive."""
    package = tmp_path / "faultbed"
    package.mkdir()
    shutil.copy(HOUSE / "faultbed" / "__init__.py", package)
    for part in PARTS:
        (package / part).write_text(f"../{part}")
    done = python("-c", "import faultbed.testbed", cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: {package}: this copy of faultbed has no symbolic links, which its package consists of; "
        "clone it with `git clone -c core.symlinks=true`, or install a wheel"
    )


@pytest.mark.process
def test_python_m_faultbed_is_the_command():
    done = python("-m", "faultbed", "--version", cwd=HOUSE)
    assert (done.returncode, done.stdout) == (0, f"faultbed, version {faultbed.__version__}\n")
