"""Tools that a fresh machine lacks: `bootstrap` installs them, and `faultbed doctor` checks for them."""

import os
import re
import shlex
import shutil
import subprocess

import pytest
from house import HOUSE

from faultbed.testbed import doctor

CUSTOMIZE = HOUSE / "testbed/backends/soft/guest/customize"
ESSENTIAL = {
    *("awk", "basename", "cat", "chmod", "chroot", "cp", "dirname", "find", "install", "ln", "ls", "mkdir", "mount"),
    *("mv", "rm", "rmdir", "sed", "sort", "truncate", "umount"),
}
"""In every Debian (coreutils, mawk, findutils, mount, sed)."""
SHELL = {"case", "cd", "closure", "do", "done", "echo", "esac", "in", "printf", "read", "root", "set", "while"}


def installed():
    """Debian packages that bootstrap makes sure of."""
    lists = re.findall(r'^(?:image_)?packages="(.*)"$', (HOUSE / "bootstrap").read_text(), re.MULTILINE)
    return set(shlex.split(" ".join(lists)))


def test_bootstrap_installs_every_package_doctor_checks():
    assert {package for _, package, _ in doctor._TOOLS if package} <= installed()


def test_doctor_checks_every_tool_that_builds_the_guest():
    """A Debian container has no xz, for example. Commands of a shell line are the first words after each separator."""
    text = re.sub(r"'[^']*'|\"[^\"]*\"|#.*", "x", CUSTOMIZE.read_text())
    commands = set(re.findall(r"(?:^|[;|&()]|\bdo\b)\s*([a-z][a-z0-9_]+)(?=\s)", text, re.MULTILINE))
    assert {"xz", "mke2fs", "awk"} <= commands
    assert commands - ESSENTIAL - SHELL <= {name for name, *_ in doctor._TOOLS}


STAND_IN = """#!/bin/sh
case "$1 $2" in
"-m venv")
    mkdir -p .venv/bin
    printf '#!/bin/sh\\necho "pip $*" >>done.txt\\n' >.venv/bin/pip
    chmod +x .venv/bin/pip
    echo venv >>done.txt ;;
"-c import sys; print(sys.version.split()[0])") echo "$VERSION" ;;
"-m faultbed.testbed.backends.soft.image")
    echo image >>done.txt
    exit "${IMAGE_STATUS:-0}" ;;
esac
"""


@pytest.fixture
def done(tmp_path):
    """Run bootstrap with stand-ins on a machine that has all packages, or none; return what it has done, in order."""
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    programs = {
        "dpkg-query": "printf '%s' \"${PACKAGES:-install ok installed}\"",
        "apt-get": 'echo "apt-get $*" >>done.txt',
        "id": "echo 0",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("bootstrap", "requirements.lock", "pyproject.toml"):
        shutil.copy(HOUSE / name, tmp_path)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(python)}

    def run(*options, version="3.11.7", status=0, **more):
        (tmp_path / "done.txt").write_text("")
        argv = [tmp_path / "bootstrap", *options]
        assert subprocess.run(argv, env={**environment, "VERSION": version, **more}, check=False).returncode == status
        return [re.sub(r" --(?!req|edit)\S+", "", line) for line in (tmp_path / "done.txt").read_text().splitlines()]

    return run


OWN = "pip install --editable ."
EVERYTHING = ["venv", "pip install --require-hashes -r requirements.lock", OWN]


@pytest.mark.process
def test_bootstrap_installs_only_what_changed(done, tmp_path):
    """The version of Python or the locked file change the environment; settings of tools change nothing."""
    assert done() == EVERYTHING
    assert done() == []
    project = (tmp_path / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(project.replace("strict = true", "strict = false"))
    assert done() == []
    (tmp_path / "pyproject.toml").write_text(
        project.replace('faultbed = "faultbed.harness.console:main"', 'other = "a:b"')
    )
    assert done() == [OWN]
    with (tmp_path / "requirements.lock").open("a") as lock:
        lock.write("# changed\n")
    assert done() == EVERYTHING
    assert done(version="3.12.1") == EVERYTHING


@pytest.mark.process
def test_bootstrap_builds_the_image_beside_the_environment_and_fails_if_that_fails(done):
    assert sorted(done("--image")) == sorted([*EVERYTHING, "image"])
    assert done("--image") == ["image"], "the image's cache is consulted each time"
    assert done("--tests") == []
    assert done("--image", status=3, IMAGE_STATUS="3") == ["image"]


@pytest.mark.process
def test_bootstrap_without_packages_installs_the_tools_of_the_image_first(done):
    """The build does not wait for QEMU, which is most of what apt installs."""
    lines = done("--image", PACKAGES="deinstall ok config-files")
    assert lines.count("apt-get update") == 1
    tools, qemu = (line for line in lines if line.startswith("apt-get install"))
    assert ("mmdebstrap" in tools, "qemu" in tools, "qemu-system-x86" in qemu) == (True, False, True)
    assert lines.index(tools) < lines.index("image")
