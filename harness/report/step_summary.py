"""A page of Markdown for CI from what a session left: JUnit files and run directories.

Shows first what somebody has to do something about: the step at which the job stopped, what preflight found, failures
with their first line, runs that are no PASS, tests that passed and failed in one session. A summary of nothing is said
to be that, so that a job which ran no test never looks green; nor does one whose tests never wrote their file.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec

from harness.record.rundir import open_run
from harness.verdict import VerdictFile
from testbed.errors import UsageError

__all__ = ["Case", "Step", "flaky", "markdown", "parse_step", "read_junit", "read_preflight", "read_verdicts"]

SHOWN_FAILURES = 30
_ROUND = re.compile(r"-?round\d+-?|\[round\d+\]")
_MARKS = {"passed": "✅", "failed": "❌", "error": "❌", "skipped": "⏭️", "PASS": "✅", "FAIL": "❌"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One test of a JUnit file; `outcome` is passed, failed, error or skipped; `said` its first line."""

    name: str
    outcome: str
    said: str
    seconds: float
    quarantined: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of the job as CI tells it; `outcome` is GitHub's or GitLab's word."""

    name: str
    outcome: str

    @property
    def stopped(self) -> bool:
        """Whether the job ended here. A step that was not reached is no news: the one before it is."""
        return self.outcome not in ("success", "skipped", "")


def parse_step(text: str) -> Step:
    """Read `preflight=failure`.

    Raises:
        UsageError: it has no name.
    """
    name, _, outcome = text.rpartition("=")
    if not name:
        raise UsageError(f"--step {text}: write it as NAME=OUTCOME")
    return Step(name=name, outcome=outcome)


def read_preflight(path: Path) -> list[str]:
    """What `faultbed preflight --out` found wrong, a sentence each; nothing of a file that is not there.

    Raises:
        UsageError: it is no such file.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Preflight)
    except FileNotFoundError:
        return []
    except msgspec.DecodeError as error:
        raise UsageError(f"{path}: not what `faultbed preflight --out` writes: {error}") from error
    return [f"{wrong.check}: {wrong.where}: {wrong.found}, right is {wrong.wanted}" for wrong in found.wrong]


class _Wrong(msgspec.Struct, frozen=True, kw_only=True):
    check: str
    where: str
    found: str
    wanted: str


class _Preflight(msgspec.Struct, frozen=True, kw_only=True):
    wrong: tuple[_Wrong, ...]


def read_junit(paths: Iterable[Path]) -> list[Case]:
    """The tests of JUnit files; a file that is not there has none (`markdown` is told its name).

    Raises:
        UsageError: a file cannot be read or is no JUnit XML.
    """
    cases = []
    for path in paths:
        try:
            tree = ET.parse(path)  # noqa: S314 (our own pytest wrote it a moment ago)
        except FileNotFoundError:
            continue
        except (OSError, ET.ParseError) as error:
            raise UsageError(f"{path}: not a JUnit file: {error}") from error
        cases += [_case(element) for element in tree.iter("testcase")]
    return cases


def _case(element: ET.Element) -> Case:
    outcome, said, quarantined = "passed", "", False
    for kind, word in (("failure", "failed"), ("error", "error"), ("skipped", "skipped")):
        found = element.find(kind)
        if found is not None:
            text = found.get("message") or found.text or ""
            outcome, said = word, next((line for line in text.strip().splitlines() if line.strip()), "")
            quarantined = found.get("type") == "pytest.xfail" and "quarantine" in text
            break
    name = f"{element.get('classname', '').replace('.', '/')}::{element.get('name', '')}"
    return Case(name=name, outcome=outcome, said=said, seconds=float(element.get("time") or 0), quarantined=quarantined)


def read_verdicts(runs: Path) -> tuple[list[VerdictFile], list[str]]:
    """The verdicts of all run directories below a folder, oldest first, and the names of runs that have none.

    Raises:
        UsageError: a verdict that is none of this version.
    """
    found, unfinished = [], []
    for folder in sorted(path for path in runs.glob("*") if (path / "experiment.toml").exists()):
        if (folder / "verdict.json").exists():
            found.append(open_run(folder).read_verdict())
        else:
            unfinished.append(folder.name)
    return found, unfinished


def flaky(cases: Sequence[Case]) -> list[tuple[str, int, int]]:
    """Tests that passed and failed in one session (`--repeat`), as (name, failed, of)."""
    rounds: dict[str, list[str]] = defaultdict(list)
    for case in cases:
        if case.outcome != "skipped":
            rounds[_ROUND.sub("", case.name)].append(case.outcome)
    return [
        (name, len(seen) - seen.count("passed"), len(seen))
        for name, seen in rounds.items()
        if 0 < seen.count("passed") < len(seen)
    ]


def markdown(
    title: str,
    cases: Sequence[Case],
    verdicts: Sequence[VerdictFile],
    unfinished: Sequence[str] = (),
    *,
    steps: Sequence[Step] = (),
    missing: Sequence[str] = (),
    preflight: Sequence[str] = (),
) -> str:
    """The page.

    Args:
        title: the headline.
        cases: of JUnit files.
        verdicts: of runs.
        unfinished: names of runs without a verdict.
        steps: of the job, in their order.
        missing: JUnit files that the tests should have written.
        preflight: what preflight found wrong.
    """
    stopped = [step for step in steps if step.stopped]
    bad = [case for case in cases if case.outcome in ("failed", "error")]
    dirty = [verdict for verdict in verdicts if verdict.lab_state != "CLEAN"]
    ran = any(case.outcome != "skipped" for case in cases) or bool(verdicts)
    troubles = (bad, dirty, unfinished, stopped, missing, preflight)
    good = ran and not any(troubles) and all(v.verdict == "PASS" for v in verdicts)
    lines = [f"## {'✅' if good else '❌'} {_plain(title)}", "", _totals(cases, verdicts, ran=ran), ""]
    lines += _stops(stopped, missing, preflight)
    if verdicts:
        lines += ["| | experiment | seed | lab | faults fired | verdict |", "|---|---|---|---|---|---|"]
        lines += [_verdict_row(verdict) for verdict in verdicts]
        lines.append("")
    if unfinished:
        lines += ["### Runs without a verdict: killed, or still running", ""]
        lines += [f"- `{name}`" for name in unfinished] + [""]
    if bad:
        lines += ["### Failures", ""]
        lines += [f"- `{case.name}`: {_plain(case.said)[:300]}" for case in bad[:SHOWN_FAILURES]]
        lines += [f"- … and {len(bad) - SHOWN_FAILURES} more"] * (len(bad) > SHOWN_FAILURES) + [""]
    if unsteady := flaky(cases):
        lines += ["### Flaky: passed and failed in this session", ""]
        lines += [f"- `{name}`: failed {failed} of {of}" for name, failed, of in unsteady] + [""]
    if left_out := [case for case in cases if case.outcome == "skipped" and "experiments" in case.name]:
        lines += ["### Experiments that were skipped: they show nothing", ""]
        lines += [f"- `{case.name}`: {_plain(case.said)[:300]}" for case in left_out] + [""]
    if quarantined := [case for case in cases if case.quarantined]:
        lines += ["### In quarantine: failed, and failed nobody", ""]
        lines += [f"- `{case.name}`: {_plain(case.said)[:300]}" for case in quarantined] + [""]
    return "\n".join(lines).rstrip() + "\n"


def _stops(stopped: Sequence[Step], missing: Sequence[str], preflight: Sequence[str]) -> list[str]:
    """Where the job stopped, and what that left undone."""
    lines = [f"**Stopped at {_plain(step.name)}**: {_plain(step.outcome)}." for step in stopped[:1]]
    lines += [f"Also not well: {_plain(step.name)}: {_plain(step.outcome)}." for step in stopped[1:]]
    lines += [f"`{name}` was not written: its tests did not start, or were killed." for name in missing]
    lines = [line for text in lines for line in (text, "")]
    if preflight:
        lines += ["### Preflight", ""]
        lines += [f"- {_plain(told)[:300]}" for told in preflight[:SHOWN_FAILURES]]
        lines += [f"- … and {len(preflight) - SHOWN_FAILURES} more"] * (len(preflight) > SHOWN_FAILURES) + [""]
    return lines


def _totals(cases: Sequence[Case], verdicts: Sequence[VerdictFile], *, ran: bool) -> str:
    if not ran:
        return "**No test and no experiment ran.** That is no pass."
    counts = {word: sum(case.outcome == word for case in cases) for word in ("passed", "failed", "error", "skipped")}
    told = [f"{count} {word}" for word, count in counts.items() if count]
    if verdicts:
        told.append(f"{sum(v.verdict == 'PASS' for v in verdicts)} of {len(verdicts)} experiments PASS")
    seconds = sum(case.seconds for case in cases)
    return ", ".join(told) + (f"; tests took {seconds:.0f} s" if cases else "")


def _verdict_row(verdict: VerdictFile) -> str:
    fired = sum(1 for fault in verdict.faults if fault.fired.count > 0)
    state = str(verdict.verdict) + ("" if verdict.lab_state == "CLEAN" else f", lab {verdict.lab_state}")
    mark = _MARKS.get(str(verdict.verdict), "⚠️") if verdict.lab_state == "CLEAN" else "❌"
    cells = (mark, _plain(verdict.experiment), str(verdict.seed), _plain(verdict.lab))
    return f"| {' | '.join(cells)} | {fired} of {len(verdict.faults)} | {state} |"


def _plain(text: str) -> str:
    """Text that cannot end a table's cell or start Markdown of its own."""
    return re.sub(r"([|<>`\[\]*_])", r"\\\1", " ".join(text.split()))
