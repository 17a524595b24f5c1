"""Known flaky tests, each with a day by which it must be fixed: `tests/quarantine.toml`.

    [[quarantine]]
    test = "tests/soft/test_lease.py::test_killed_controllers_leave_nothing"
    why = "the guest's clock stands still under TCG on one runner; see the log of the first failure"
    until = 2026-12-24

Until that day the test runs, and its failure is reported but does not fail the session. A lab that it leaves DIRTY is
never excused. After that day the test fails whatever it does: fix it, remove it, or give a new date with a new reason.
An entry without its test is an error.
"""

from __future__ import annotations

import datetime as dt
import re
from pathlib import Path

import msgspec

from faultbed.testbed.errors import ConfigError

__all__ = ["LONGEST", "Entry", "match", "read"]

LONGEST = dt.timedelta(days=60)
"""The most time until the day of an entry."""

_ROUND = re.compile(r"\[(?:(.*)-)?round\d+(?:-(.*))?\]$")


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One test in quarantine, until the end of a day."""

    test: str
    why: str
    until: dt.date

    def expired(self, today: dt.date) -> bool:
        """Return whether its last day is over."""
        return today > self.until


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    quarantine: tuple[Entry, ...] = ()


def read(path: Path, *, today: dt.date) -> tuple[Entry, ...]:
    """Return the entries of a file; a file that does not exist has none.

    Raises:
        ConfigError: the file has unknown keys, a test twice, an entry without a reason, or a date too far away.
    """
    try:
        entries = msgspec.toml.decode(path.read_bytes(), type=_File).quarantine
    except FileNotFoundError:
        return ()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    for index, entry in enumerate(entries):
        at = f"{path}: quarantine[{index}]"
        if not entry.why.strip():
            raise ConfigError(f"{at}.why: write what is known about the flake")
        if entry.until - today > LONGEST:
            raise ConfigError(f"{at}.until: {entry.until} is more than {LONGEST.days} days away; take a nearer day")
        if any(other.test == entry.test for other in entries[:index]):
            raise ConfigError(f"{at}.test: {entry.test} has two entries; remove one")
    return entries


def match(entries: tuple[Entry, ...], nodeid: str) -> Entry | None:
    """Return the entry of a test, or None. The rounds of a repeated test (`[round3]`) share its entry."""
    plain = _ROUND.sub(_without_round, nodeid)
    return next((entry for entry in entries if entry.test in (nodeid, plain)), None)


def _without_round(match: re.Match[str]) -> str:
    rest = "-".join(part for part in match.groups() if part)
    return f"[{rest}]" if rest else ""
