"""A Markdown page for CI from the output of a session: JUnit files and run directories.

It lists first what needs action: the step at which the job stopped, preflight findings, failures with their first line,
runs that are not PASS, and flaky tests. If no test ran, the page says so, so that such a job never looks green. The
same holds for tests that wrote no file or a truncated one.

GitHub accepts at most 1 MiB per step and shows nothing of a longer page ("upload aborted, supports content up to a size
of 1024k"). Every list is therefore limited, with a count of the omitted entries. Text from tests and files is escaped
for GitHub's Markdown (GFM, "Backslash escapes", "Code spans"), so that no name can end a cell or open a tag.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec

from faultbed.harness.record.rundir import find_run_folders, open_run
from faultbed.harness.verdict import LabState, Verdict, VerdictFile
from faultbed.testbed.errors import UsageError

__all__ = [
    "Case",
    "JobResults",
    "Joint",
    "Step",
    "flaky",
    "markdown",
    "parse_step",
    "read_joint",
    "read_junit",
    "read_preflight",
    "read_verdicts",
]

SHOWN = 30
"""Entries per list. A page has at most ten lists."""
SHOWN_RUNS = 200
LONGEST = 300
"""Maximum length of a name or of its message."""
_SWEEP = "sweep.json"
_JOINT = ("pooled.json", _SWEEP)
_ROUND = re.compile(r"-?round\d+-?|\[round\d+\]")
_MARKS = {"passed": "✅", "failed": "❌", "error": "❌", "skipped": "⏭️", "PASS": "✅", "FAIL": "❌"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One test of a JUnit file.

    `outcome` is passed, failed, error or skipped; `message` is the first line of its message. A test in quarantine
    (`quarantined`) that fails is reported as skipped, like pytest's xfail.
    """

    name: str
    outcome: str
    message: str
    seconds: float
    quarantined: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of the CI job; `outcome` is GitHub's or GitLab's term."""

    name: str
    outcome: str

    @property
    def stopped(self) -> bool:
        """Whether the job ended at this step. False for a step that was not reached: an earlier one stopped the job."""
        return self.outcome not in ("success", "skipped", "")


def parse_step(text: str) -> Step:
    """Parse `preflight=failure`.

    Raises:
        UsageError: the name is missing.
    """
    name, _, outcome = text.rpartition("=")
    if not name:
        raise UsageError(f"--step {text}: write it as NAME=OUTCOME")
    return Step(name=name, outcome=outcome)


def read_preflight(path: Path) -> list[str]:
    """Return the findings of `faultbed preflight --out`, one sentence each; none if the file does not exist.

    Raises:
        UsageError: the file has another format.
    """
    try:
        preflight = msgspec.json.decode(path.read_bytes(), type=_Preflight)
    except FileNotFoundError:
        return []
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"{path}: not what `faultbed preflight --out` writes: {error}") from error
    return [f"{entry.check}: {entry.where}: {entry.found}, expected {entry.wanted}" for entry in preflight.wrong]


class _FindingEntry(msgspec.Struct, frozen=True, kw_only=True):
    check: str
    where: str
    found: str
    wanted: str


class _Preflight(msgspec.Struct, frozen=True, kw_only=True):
    wrong: tuple[_FindingEntry, ...]


def read_junit(paths: Iterable[Path]) -> list[Case]:
    """Return the tests of JUnit files. A missing file has none; `markdown` lists missing files.

    Raises:
        UsageError: a file cannot be read, is not JUnit XML, or has no test: then nothing was tested.
    """
    cases = []
    for path in paths:
        try:
            tree = ET.parse(path)  # noqa: S314 (written by pytest in this job)
        except FileNotFoundError:
            continue
        except (OSError, ET.ParseError) as error:
            raise UsageError(f"{path}: not a JUnit file: {error}") from error
        try:
            own = [_case(element) for element in tree.iter("testcase")]
        except ValueError as error:
            raise UsageError(f"{path}: not a JUnit file of pytest's: {error}") from error
        if not own:
            raise UsageError(f"{path}: no test is in it; find out why no test was selected or collected")
        cases += own
    return cases


def _case(element: ET.Element) -> Case:
    outcome, message = "passed", ""
    quarantined = any(property_element.get("name") == "quarantine" for property_element in element.iter("property"))
    for kind, word in (("failure", "failed"), ("error", "error"), ("skipped", "skipped")):
        child = element.find(kind)
        if child is not None:
            text = child.get("message") or child.text or ""
            outcome, message = word, next((line for line in text.strip().splitlines() if line.strip()), "")
            break
    return Case(
        name=_name(element.get("classname", ""), element.get("name", "")),
        outcome=outcome,
        message=message,
        seconds=float(element.get("time") or 0),
        quarantined=quarantined,
    )


def _name(classname: str, name: str) -> str:
    """Return the pytest node id of a test, without `.py`.

    A class name such as `tests.experiments.demo.toml` is a file.
    """
    folders, dot, suffix = classname.rpartition(".toml")
    place = f"{folders.replace('.', '/')}.toml" if dot and not suffix else classname.replace(".", "/")
    return f"{place}::{name}"


def read_verdicts(runs: Path) -> tuple[list[VerdictFile], list[str], list[str]]:
    """Return the verdicts of all run directories in a folder, at any depth, oldest first; a link to a run counts once.

    The runs of a sweep are left out: `sweep.json` has their verdict, and a run that was an ERROR may have been
    repeated.

    Returns:
        The verdicts, the names of runs without one, and the errors of those that cannot be read.
    """
    verdicts, unfinished, broken = [], [], []
    root = runs.resolve()
    for folder in find_run_folders(runs, lambda error: broken.append(f"{error.filename}: {error.strerror}")):
        if any((parent / _SWEEP).exists() for parent in folder.parents if parent.is_relative_to(root)):
            continue
        if not (folder / "verdict.json").exists():
            unfinished.append(str(folder.relative_to(root)) if folder.is_relative_to(root) else str(folder))
            continue
        try:
            verdicts.append(open_run(folder).read_verdict())
        except UsageError as error:
            broken.append(str(error))
    return verdicts, unfinished, broken


class Joint(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict of several runs together, from `pooled.json` or `sweep.json`. `name` is that of its folder."""

    experiment: str
    verdict: Verdict
    lab_state: LabState
    name: str = ""


def read_joint(runs: Path) -> tuple[list[Joint], list[str]]:
    """Return the verdicts of the pools and sweeps in a folder, and the errors of those that cannot be read.

    A pool can be INCONCLUSIVE although each of its runs is a PASS, and the runs of a sweep are in its own folder.
    """
    joint, broken = [], []
    for path in sorted(path for name in _JOINT for path in runs.rglob(name)):
        try:
            read = msgspec.json.decode(path.read_bytes(), type=Joint)
        except (OSError, msgspec.DecodeError, RecursionError) as error:
            broken.append(f"{path}: not as faultbed writes it: {error}")
        else:
            joint.append(msgspec.structs.replace(read, name=path.parent.name))
    return joint, broken


def flaky(cases: Sequence[Case]) -> list[tuple[str, int, int]]:
    """Return tests that passed and failed in one session (`--repeat`), as (name, failed, of)."""
    rounds: dict[str, list[str]] = defaultdict(list)
    for case in cases:
        if case.outcome != "skipped":
            rounds[_ROUND.sub("", case.name)].append(case.outcome)
    return [
        (name, len(outcomes) - outcomes.count("passed"), len(outcomes))
        for name, outcomes in rounds.items()
        if 0 < outcomes.count("passed") < len(outcomes)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResults:
    """The results of a CI job.

    `cases` are the tests of its JUnit files, `verdicts` those of its runs, and `unfinished` the names of runs without a
    verdict. `steps` are in order. `missing` are JUnit files that the tests should have written. `preflight` are the
    findings of preflight. `broken` are the files that cannot be read, with the reason. `joint` are the verdicts of
    several runs together. `worse` are regressions (`faultbed.harness.report.history`), which change neither a verdict
    nor the headline.
    """

    cases: Sequence[Case] = ()
    verdicts: Sequence[VerdictFile] = ()
    unfinished: Sequence[str] = ()
    steps: Sequence[Step] = ()
    missing: Sequence[str] = ()
    preflight: Sequence[str] = ()
    broken: Sequence[str] = ()
    joint: Sequence[Joint] = ()
    worse: Sequence[str] = ()

    @property
    def failed(self) -> list[Case]:
        """The tests that failed or ended with an error."""
        return [case for case in self.cases if case.outcome in ("failed", "error")]

    @property
    def has_run(self) -> bool:
        """Whether any test or experiment ran."""
        return any(case.outcome != "skipped" for case in self.cases) or bool(self.verdicts or self.joint)

    @property
    def is_good(self) -> bool:
        """Whether something ran, everything passed, every lab is CLEAN, and nothing is missing or unreadable."""
        troubles = (self.failed, self.unfinished, self.missing, self.preflight, self.broken)
        return (
            self.has_run
            and not any(troubles)
            and not any(step.stopped for step in self.steps)
            and all(map(_is_clean_pass, self.verdicts))
            and all(map(_is_clean_pass, self.joint))
        )


def markdown(title: str, results: JobResults) -> str:
    """Return the page as Markdown, with `title` as its headline."""
    cases = results.cases
    lines = [f"## {'✅' if results.is_good else '❌'} {_plain(title)}", "", _totals(results), ""]
    lines += _stops([step for step in results.steps if step.stopped], results.missing, results.preflight)
    lines += _section("Files that cannot be read", [_plain(text) for text in results.broken])
    lines += _verdict_table(results.verdicts)
    lines += _section(
        "Runs without a verdict: killed, still running, or kept by fuzz as a failure to run again",
        [_code(name) for name in results.unfinished],
    )
    lines += _section(
        "Pools and sweeps that are no PASS",
        [f"{_code(joint.name)}: {_plain(_state(joint))}" for joint in results.joint if not _is_clean_pass(joint)],
    )
    lines += _section("Regressions against earlier runs", [_plain(text) for text in results.worse])
    lines += _section("Failures", [_case_line(case) for case in results.failed])
    lines += _section(
        "Flaky: passed and failed in this session",
        [f"{_code(name)}: failed {failed} of {of}" for name, failed, of in flaky(cases)],
    )
    skipped = [case for case in cases if case.outcome == "skipped"]
    lines += _section(
        "Experiments that were skipped: they show nothing",
        [_case_line(case) for case in skipped if ".toml::" in case.name and not case.quarantined],
    )
    lines += _section(
        "In quarantine: failed, without failing the run", [_case_line(case) for case in skipped if case.quarantined]
    )
    passed = [case for case in cases if case.outcome == "passed" and case.quarantined]
    lines += _section("In quarantine, and passed: is it fixed?", [_code(case.name) for case in passed])
    return "\n".join(lines).rstrip() + "\n"


def _verdict_table(verdicts: Sequence[VerdictFile]) -> list[str]:
    """Return a table with a row for each run. If there are too many, runs that need attention come first."""
    if not verdicts:
        return []
    shown = sorted(verdicts, key=_is_clean_pass)[:SHOWN_RUNS] if len(verdicts) > SHOWN_RUNS else verdicts
    return [
        "| | experiment | seed | lab | faults fired | verdict |",
        "|---|---|---|---|---|---|",
        *(_verdict_row(verdict) for verdict in shown),
        *([f"| | … and {len(verdicts) - len(shown)} more | | | | |"] if len(verdicts) > len(shown) else []),
        "",
    ]


def _stops(stopped: Sequence[Step], missing: Sequence[str], preflight: Sequence[str]) -> list[str]:
    """Describe where the job stopped, and what it therefore did not do."""
    lines = [f"**Stopped at {_plain(step.name)}**: {_plain(step.outcome)}." for step in stopped[:1]]
    lines += [f"Did not succeed either: {_plain(step.name)}: {_plain(step.outcome)}." for step in stopped[1:]]
    lines += [f"{_code(name)} was not written: its tests did not start, or were killed." for name in missing]
    lines = [line for text in lines for line in (text, "")]
    return lines + _section("Preflight", [_plain(finding) for finding in preflight])


def _section(headline: str, entries: Sequence[str]) -> list[str]:
    """Return a headline with a list, or nothing if the list is empty."""
    if not entries:
        return []
    more = [f"- … and {len(entries) - SHOWN} more"] * (len(entries) > SHOWN)
    return [f"### {headline}", "", *(f"- {entry}" for entry in entries[:SHOWN]), *more, ""]


def _case_line(case: Case) -> str:
    return f"{_code(case.name)}: {_plain(case.message)}"


def _totals(results: JobResults) -> str:
    cases, verdicts = results.cases, results.verdicts
    if not results.has_run:
        return "**No test and no experiment ran.** That is no pass."
    counts = {word: sum(case.outcome == word for case in cases) for word in ("passed", "failed", "error", "skipped")}
    parts = [f"{count} {word}" for word, count in counts.items() if count]
    if verdicts:
        parts.append(f"{sum(v.verdict == 'PASS' for v in verdicts)} of {len(verdicts)} experiments PASS")
    seconds = sum(case.seconds for case in cases)
    return ", ".join(parts) + (f"; tests took {seconds:.0f} s" if cases else "")


def _is_clean_pass(verdict: VerdictFile | Joint) -> bool:
    return verdict.verdict == "PASS" and verdict.lab_state == "CLEAN"


def _state(verdict: VerdictFile | Joint) -> str:
    return str(verdict.verdict) + ("" if verdict.lab_state == "CLEAN" else f", lab {verdict.lab_state}")


def _verdict_row(verdict: VerdictFile) -> str:
    fired = sum(1 for fault in verdict.faults if fault.fired.count > 0)
    mark = _MARKS.get(str(verdict.verdict), "⚠️") if verdict.lab_state == "CLEAN" else "❌"
    cells = (mark, _plain(verdict.experiment), str(verdict.seed), _plain(verdict.lab))
    return f"| {' | '.join(cells)} | {fired} of {len(verdict.faults)} | {_state(verdict)} |"


def _plain(text: str) -> str:
    """Escape text so that it cannot end a table cell or start Markdown, a tag, an entity or a formula."""
    return re.sub(r"([\\|<>`\[\]*_~$&])", r"\\\1", _short(text))


def _code(text: str) -> str:
    """Return a code span with a fence longer than any run of backticks in the text."""
    inside = _short(text)
    fence = "`" * (1 + max(map(len, re.findall(r"`+", inside)), default=0))
    return f"{fence} {inside} {fence}" if len(fence) > 1 else f"`{inside}`"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}…"
