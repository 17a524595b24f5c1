"""The wheel, beside packages and projects that use the names of faultbed's folders."""

import hashlib
import os
import subprocess
import sys
import tarfile
import zipfile

import pytest
from house import HOUSE

pytestmark = pytest.mark.process

FOLDERS = ("harness", "inject", "testbed", "traffic")
THEIR_TEST = """\
import harness, inject, testbed, traffic

def test_own_folders():
    assert {module.WHOSE for module in (harness, inject, testbed, traffic)} == {"theirs"}

def test_fixtures_of_faultbed(pytestconfig):
    assert pytestconfig.pluginmanager.has_plugin("faultbed")
"""


def run(*words, **options):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [*map(str, words)], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        env=environment | options.pop("env", {}), **options,
    )  # fmt: skip
    assert done.returncode == options.get("code", 0), f"{words}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "build", "--outdir", folder, HOUSE)
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return path


def tracked():
    """Digest of each file that belongs into the wheel, by its name there."""
    listed = run("git", "ls-files", "-co", "--exclude-standard", "-z", cwd=HOUSE).split("\0")
    homes = {folder: f"faultbed/{folder}" for folder in (*FOLDERS, "playbooks", "inventory")}
    homes |= {"tests/experiments": "faultbed/experiments", "faultbed": "faultbed"}
    return {
        home + name.removeprefix(folder): hashlib.sha256((HOUSE / name).read_bytes()).hexdigest()
        for name in listed
        for folder, home in homes.items()
        if name.startswith(f"{folder}/") and (HOUSE / name).is_file() and not (HOUSE / name).is_symlink()
    }


def test_wheel_of_the_source_distribution_has_all_files_of_the_checkout_and_one_top_level_name(built, wheel):
    """Links become files; a search that does not enter links would leave out nearly everything."""
    with zipfile.ZipFile(wheel) as archive:
        contents = {
            name: hashlib.sha256(archive.read(name)).hexdigest()
            for name in archive.namelist()
            if ".dist-info/" not in name
        }
    assert {name.split("/")[0] for name in contents} == {"faultbed"}
    assert contents == tracked()
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        assert not [member.name for member in archive if member.issym() or member.islnk()]


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The commands of an environment with the wheel, and PyPI's packages `traffic` and `inject` beside it."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder)
    pip = (folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile")
    run(*pip, wheel)
    run(*pip, "--no-deps", "traffic", "inject")  # their own needs have other names
    return folder / "bin"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project with folders of the same names."""
    folder = tmp_path_factory.mktemp("project")
    for name in FOLDERS:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text('WHOSE = "theirs"\n')
    (folder / "test_theirs.py").write_text(THEIR_TEST)
    return folder


def test_wheel_works_beside_packages_and_folders_of_the_same_names(installed, project, tmp_path):
    environment = {"FAULTBED_HOME": str(tmp_path / "home"), "FAULTBED_CACHE": str(tmp_path / "cache")}
    faultbed = installed / "faultbed"
    assert run(faultbed, "--version", cwd=project).startswith("faultbed, version ")
    assert "link.flap" in run(faultbed, "faults", cwd=project, env=environment)
    assert "nothing wrong" in run(faultbed, "--lab", "soft", "inventory", "check", cwd=project, env=environment)
    assert "link.flap on rtsw1:host1:rxe0" in run(faultbed, "run", "minimal", "--plan", cwd=project, env=environment)
    doctor = subprocess.run(
        [faultbed, "doctor"], capture_output=True, text=True, check=False, cwd=project, env=os.environ | environment
    )
    assert "lab soft" in doctor.stdout, doctor.stderr  # its exit code depends on the machine
    assert "Traceback" not in doctor.stderr
    assert "2 passed" in run(installed / "python", "-m", "pytest", "-q", cwd=project)
    assert "2 passed" in run(installed / "pytest", "-q", cwd=project)
    assert run(installed / "python", "-c", "import inject; print(callable(inject.configure))", cwd="/") == "True\n"
    assert run(installed / "python", "-m", "faultbed", "--version", cwd=project).startswith("faultbed, version ")


def test_wheel_has_the_digest_of_the_checkout(installed, project):
    code = "from faultbed.harness.record import code; print(code.digest())"
    assert run(installed / "python", "-P", "-c", code, cwd=project) == run(
        sys.executable, "-P", "-c", code, cwd=project
    )


def test_wheel_without_extras_names_them(installed, project, tmp_path):
    done = subprocess.run(
        [installed / "faultbed", "fuzz", "--plan", "--out", tmp_path], capture_output=True, text=True, check=False,
        cwd=project,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (4, 1)
    assert "pip install 'faultbed[fuzz]'" in done.stderr
