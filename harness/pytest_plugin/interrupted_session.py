"""Add the tests that an interrupted session did not finish to its JUnit file, so that the file does not look complete.

pytest writes no report about a test in which the session is interrupted (Ctrl-C, `pytest.exit`), nor about those after
it. A JUnit file of 2 of 100 tests, both passed, is no pass.
"""

from __future__ import annotations

from typing import Literal

import pytest
from _pytest.junitxml import xml_key

from faultbed.harness.pytest_plugin.keys import BEGAN, ENDED

__all__ = ["report_unfinished"]


def report_unfinished(session: pytest.Session) -> None:
    """Add an error to the JUnit file, if there is one, for each test that has not ended."""
    xml = session.config.stash.get(xml_key, None)
    if xml is None:
        return
    unfinished = [item for item in getattr(session, "items", []) if not item.stash.get(ENDED, False)]
    for item in unfinished:
        if item.stash.get(BEGAN, False):
            report = _report(item.nodeid, item.location, "teardown", "the session was interrupted during this test")
        else:
            report = _report(item.nodeid, item.location, "setup", "did not run: the session was interrupted before it")
        xml.pytest_runtest_logreport(report)
    if not unfinished:  # before or after all tests, or with the tests in workers of pytest-xdist
        report = _report("session", ("session", None, "session"), "setup", "the session was interrupted")
        xml.pytest_runtest_logreport(report)


def _report(
    nodeid: str, location: tuple[str, int | None, str], when: Literal["setup", "teardown"], text: str
) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=nodeid, location=location, keywords={}, outcome="failed", longrepr=text, when=when, duration=0.0
    )
