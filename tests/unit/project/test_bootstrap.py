"""Tools that a fresh machine lacks: `bootstrap` installs them, and `faultbed doctor` checks for them."""

import re
import shlex

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
