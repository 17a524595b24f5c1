"""Flaky tests that are known, each with a date on which it is flaky no longer: `tests/quarantine.toml`.

    [[quarantine]]
    test = "tests/soft/test_lease.py::test_a_killed_controller_leaves_nothing[link.flap]"
    why = "the guest's clock stands still under TCG on one runner; see the log of the first failure"
    until = 2026-12-24

Until that day the test runs, and its failure is told but fails nobody; that it leaves the lab DIRTY is never excused.
After it the test fails, whatever it does: mend it, remove it, or give a new date with a new reason. An entry whose test
is gone is an error too.
"""

from __future__ import annotations

import datetime as dt
import re
from pathlib import Path

import msgspec

from testbed.errors import ConfigError

__all__ = ["LONGEST", "Entry", "match", "read"]

LONGEST = dt.timedelta(days=60)
"""How far ahead an entry may reach: longer is not quarantine but forgetting."""

_ROUND = re.compile(r"\[(?:(.*)-)?round\d+(?:-(.*))?\]$")


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One test in quarantine, until the end of a day."""

    test: str
    why: str
    until: dt.date

    def expired(self, today: dt.date) -> bool:
        """Whether its time is over."""
        return today > self.until


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    quarantine: tuple[Entry, ...] = ()


def read(path: Path, *, today: dt.date) -> tuple[Entry, ...]:
    """The entries of a file; none when there is no file.

    Raises:
        ConfigError: it is not what it should be: unknown keys, a test twice, no reason, a date too far away.
    """
    try:
        found = msgspec.toml.decode(path.read_bytes(), type=_File).quarantine
    except FileNotFoundError:
        return ()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    for index, entry in enumerate(found):
        at = f"{path}: quarantine[{index}]"
        if not entry.why.strip():
            raise ConfigError(f"{at}.why: say what is known about the flake, so that somebody can mend it")
        if entry.until - today > LONGEST:
            raise ConfigError(f"{at}.until: {entry.until} is more than {LONGEST.days} days away; take a nearer day")
        if any(other.test == entry.test for other in found[:index]):
            raise ConfigError(f"{at}.test: {entry.test} is there twice")
    return found


def match(entries: tuple[Entry, ...], nodeid: str) -> Entry | None:
    """The entry of a test, if it has one. A repeated test (`[round3]`) is the test itself."""
    plain = _ROUND.sub(_without_round, nodeid)
    return next((entry for entry in entries if entry.test in (nodeid, plain)), None)


def _without_round(found: re.Match[str]) -> str:
    rest = "-".join(part for part in found.groups() if part)
    return f"[{rest}]" if rest else ""
