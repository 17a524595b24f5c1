"""A session of pytest, as a program that `forked` starts: it imports what sessions with our plugin import."""

import sys
from importlib.metadata import entry_points

import hypothesis  # noqa: F401
import pytest

import faultbed.testbed.provision  # noqa: F401

for plugin in entry_points(group="pytest11"):
    plugin.load()


def main() -> None:
    """Run pytest with the arguments of this process."""
    sys.exit(pytest.console_main())
