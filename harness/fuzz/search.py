"""Search for failing cases with hypothesis: draw, run and shrink cases, and replay earlier failures.

hypothesis draws and shrinks cases, and stores failing ones in its database. This module adds what expensive runs need:
no case runs twice, a budget can end the search at any time, and each kind of failure is searched for separately.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

from faultbed.harness.fuzz.case import Case, describe, size, to_toml
from faultbed.harness.fuzz.outcome import CaseRun, Failure, Outcome

__all__ = ["Search"]

_SHRINKING_S = 300.0
"""Time after which hypothesis stops shrinking (conjecture/engine.py, MAX_SHRINKING_SECONDS): about ten runs on a
lab."""
_BATCH = 9
"""Examples per call of hypothesis. With ten or more, it keeps the first tenth small (`generate_new_examples`), so that
the dozen runs of a few minutes would all be of nearly empty cases."""
_MAX_BATCHES_WITHOUT_NEW = 50
"""Batches in a row without a new case, after which the strategy counts as exhausted."""


@dataclass(kw_only=True)
class Search:
    """A search over the cases of one strategy.

    Args:
        strategy: the cases.
        run: runs a case. If it raises an exception, the search ends and `go` raises it.
        may_run: called before every run; False ends the search.
        database: folder of the failures of earlier searches; None: none are replayed or stored.
        key: name of the strategy in the database: cases of another strategy cannot be replayed.
        seed: decides what is drawn.
        progress: called with a line about each run.
    """

    strategy: st.SearchStrategy[Case]
    run: Callable[[Case], Outcome]
    may_run: Callable[[], bool]
    database: Path | None
    key: str
    seed: int
    progress: Callable[[str], None]
    tried: list[CaseRun] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    _known: dict[str, Outcome] = field(default_factory=dict)

    def go(self) -> None:
        """Search until the budget is spent or no case is left. `tried` and `failures` grow during the search.

        Raises:
            Exception: the exception that `run` raised, or KeyboardInterrupt. `failures` has those found before.
        """
        try:
            while self._find_one():
                pass
        except _Ended as end:
            if end.error is not None:
                raise end.error from None
        finally:
            self._keep_unshrunk()

    def _keep_unshrunk(self) -> None:
        """Record failures that appeared while another one was being shrunk, and did not occur again."""
        for trial in self.tried:
            new = trial.outcome.failed - {name for failure in self.failures for name in failure.checks}
            if new:
                self.failures.append(
                    Failure(
                        checks=tuple(sorted(new)),
                        first=trial.case,
                        smallest=trial.case,
                        outcome=trial.outcome,
                        is_smallest=False,
                        fails_again=None,
                        runs=1,
                    )
                )

    def _find_one(self) -> bool:
        """Find and shrink one more kind of failure; return False if no case is left."""
        search = _FailureSearch(known_checks=frozenset(name for failure in self.failures for name in failure.checks))
        is_smallest, fails_again = False, None
        try:
            smallest = self._shrunk(search)
            is_smallest = True
            if smallest is None:
                return False
            search.failing = [smallest]
            checks = self._known[to_toml(smallest)].failed & search.checks
            fails_again = bool(self._outcome(smallest, repeat=True).failed & checks)
        finally:
            # Also if the budget, Ctrl-C or an error ended the search: keep the smallest failing case so far.
            if search.failing:
                smallest = min(search.failing, key=size)
                outcome = self._known[to_toml(smallest)]
                self.failures.append(
                    Failure(
                        checks=tuple(sorted(outcome.failed & search.checks)),
                        first=search.first or smallest,
                        smallest=smallest,
                        outcome=outcome,
                        is_smallest=is_smallest,
                        fails_again=fails_again,
                        runs=len(self.tried) - search.first_run,
                    )
                )
        return True

    def _shrunk(self, search: _FailureSearch) -> Case | None:
        """Return the smallest case that fails in a new way; None: there is none."""

        def fails(case: Case) -> bool:
            new = self._outcome(case).failed - search.known_checks
            if not search.checks and new:
                search.checks, search.first, search.first_run = new, case, len(self.tried)
                search.failing_since = time.monotonic()
                self.progress(f"run {len(self.tried)} fails ({', '.join(sorted(new))}): shrinking it")
            if not new & search.checks:
                return False
            search.failing.append(case)
            return True

        without_new = 0
        for batch in itertools.count():
            ran = len(self._known)
            if (smallest := self._find(fails, batch)) is not None:
                break
            without_new = without_new + 1 if len(self._known) == ran else 0
            if without_new == _MAX_BATCHES_WITHOUT_NEW:
                return None
        before = None
        while smallest != before and time.monotonic() - search.failing_since > _SHRINKING_S:
            search.failing_since = time.monotonic()
            # hypothesis continues from its database; outcomes that are known cost nothing.
            before, smallest = smallest, self._find(fails, batch)
        return smallest

    def _find(self, fails: Callable[[Case], bool], batch: int) -> Case | None:
        """Find a case that fails, as `hypothesis.find` does, but with both a seed and a database.

        `hypothesis.find` ignores its database if it is seeded.
        """
        number, last_failing = len(self.failures), list[Case]()

        @settings(
            max_examples=_BATCH,
            database=None
            if self.database is None
            else DirectoryBasedExampleDatabase(self.database / self.key / str(number)),
            phases=(Phase.reuse, Phase.generate, Phase.shrink),
            deadline=None,
            verbosity=Verbosity.quiet,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )  # after `seed`, which sets the database to None (core.py)
        @seed(f"{self.seed}/{number}/{batch}")
        @given(self.strategy)
        def drawn(case: Case) -> None:
            if fails(case):
                last_failing[:] = [case]
                raise _Fails

        try:
            drawn()
        except _Fails:
            return last_failing[0]
        return None

    def _outcome(self, case: Case, *, repeat: bool = False) -> Outcome:
        key = to_toml(case)
        if not repeat and key in self._known:
            return self._known[key]
        if not self.may_run():
            raise _Ended(None)
        started = time.monotonic()
        try:
            outcome = self.run(case)
        except Exception as error:
            # hypothesis would take it for a failure of the case, and shrink it.
            raise _Ended(error) from error
        self.tried.append(CaseRun(case=case, outcome=outcome, seconds=time.monotonic() - started))
        self._known.setdefault(key, outcome)
        result = ", ".join(sorted(outcome.failed)) or outcome.verdict
        self.progress(f"run {len(self.tried)}: {result}: {describe(case)}")
        return outcome


@dataclass(kw_only=True)
class _FailureSearch:
    """The search for one kind of failure: failed `checks` that no earlier search has found (`known_checks`)."""

    known_checks: frozenset[str]
    checks: frozenset[str] = frozenset()
    first: Case | None = None
    first_run: int = 0
    failing_since: float = 0.0
    failing: list[Case] = field(default_factory=list)


class _Fails(Exception):
    """Raised for a case that fails, for hypothesis to shrink."""


class _Ended(BaseException):
    """Ends a search from inside hypothesis. Failures found so far stay in its database."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error = error
