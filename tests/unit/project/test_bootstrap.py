"""Tools that a fresh machine lacks: `bootstrap` installs them, and `faultbed doctor` checks for them."""

import os
import re
import shlex
import shutil
import subprocess

import pytest
from house import HOUSE

from testbed import doctor

CUSTOMIZE = HOUSE / "testbed/backends/soft/guest/customize"
ESSENTIAL = {
    *("awk", "basename", "cat", "chmod", "chroot", "cp", "dirname", "find", "install", "ln", "ls", "mkdir", "mount"),
    *("mv", "rm", "rmdir", "sed", "sort", "truncate", "umount"),
}
"""In every Debian (coreutils, mawk, findutils, mount, sed)."""
SHELL = {"case", "cd", "closure", "do", "done", "echo", "esac", "in", "printf", "read", "root", "set", "while"}


def installed():
    """Debian packages that bootstrap makes sure of."""
    return set(shlex.split(re.search(r'^packages="(.*)"$', (HOUSE / "bootstrap").read_text(), re.MULTILINE)[1]))


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
esac
"""


@pytest.mark.process
def test_bootstrap_installs_only_what_changed(tmp_path):
    """The version of Python or the locked file change the environment; settings of tools change nothing."""
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    (tmp_path / "dpkg-query").write_text("#!/bin/sh\nprintf 'install ok installed'\n")
    (tmp_path / "dpkg-query").chmod(0o755)
    for name in ("bootstrap", "requirements.lock", "pyproject.toml"):
        shutil.copy(HOUSE / name, tmp_path)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(python)}

    def done(version="3.11.7"):
        (tmp_path / "done.txt").write_text("")
        subprocess.run([tmp_path / "bootstrap"], env={**environment, "VERSION": version}, check=True)
        return [re.sub(r" --(?!req|edit)\S+", "", line) for line in (tmp_path / "done.txt").read_text().splitlines()]

    own = "pip install --editable ."
    everything = ["venv", "pip install --require-hashes -r requirements.lock", own]
    assert done() == everything
    assert done() == []
    project = (tmp_path / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(project.replace("strict = true", "strict = false"))
    assert done() == []
    (tmp_path / "pyproject.toml").write_text(project.replace('faultbed = "harness.console:main"', 'other = "a:b"'))
    assert done() == [own]
    with (tmp_path / "requirements.lock").open("a") as lock:
        lock.write("# changed\n")
    assert done() == everything
    assert done(version="3.12.1") == everything
