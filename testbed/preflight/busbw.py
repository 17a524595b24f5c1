"""Compare the output of nccl-tests with the lab's table `faultbed_busbw`. Pure.

busbw is that of nccl-tests (doc/PERFORMANCE.md): comparable with the link speed at any number of ranks. A size between
two lines of the table must reach the lower line's value. A size below all lines is not judged, because latency
dominates there. Not yet run on hardware; the format is that of nccl-tests' own output.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory.schema import BusbwVars

__all__ = ["Measured", "Run", "Shortfall", "compare", "read"]

_TAG = re.compile(r"^\[\d+,\d+\](?:<std(?:out|err)>)?: ?", re.MULTILINE)
"""Prefix of each line with `mpirun --tag-output`: job, rank and stream (Open MPI, mpirun(1))."""
_RANK = re.compile(r"^#\s+Rank\s+([0-9]+) ", re.MULTILINE)
_NAME = r"(all_reduce|all_gather|reduce_scatter|alltoall|broadcast|reduce|sendrecv)_perf"
_TEST = re.compile(_NAME)
_STARTING = re.compile(rf"^#\s*Collective test starting: {_NAME}", re.MULTILINE)
# size count type redop root, then time algbw busbw #wrong out of place, and the same in place
_LINE = re.compile(
    r"^\s*(?P<size>[0-9]+)\s+[0-9]+\s+\w+\s+(?P<redop>\w+)\s+(?P<root>-?[0-9]+)"
    r"\s+[0-9.]+\s+[0-9.]+\s+(?P<out>[0-9.]+)\s+(?P<out_wrong>[0-9.]+(?:e\+[0-9]+)?|N/A)"
    r"\s+[0-9.]+\s+[0-9.]+\s+(?P<in>[0-9.]+)\s+(?P<in_wrong>[0-9.]+(?:e\+[0-9]+)?|N/A)\s*$",
    re.MULTILINE,
)
"""A million wrong elements are `1e+06`: nccl-tests prints their number with %g (src/common.cu)."""
_ROW = re.compile(r"^\s*[0-9]+\s+[0-9]+\s+\w+\s+\w+\s+-?[0-9]+\s.*$", re.MULTILINE)
"""A line that begins like a row of results."""
_END = re.compile(r"^#?\s*Out of bounds values\s*:(?P<result>.*)", re.MULTILINE)
"""The end of the output of every run that came to its end (src/common.cu)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One line of nccl-tests: the slower of out-of-place and in-place, GB/s (10^9 bytes), and wrong elements."""

    size_bytes: int
    gbytes_per_s: float
    wrong: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One program's output: the collective (None: unknown), the number of ranks, and its lines."""

    collective: str | None
    ranks: int
    lines: tuple[Measured, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """A size that is slower than the table requires, or whose data was wrong."""

    where: str
    observed: str
    expected: str


def read(text: str) -> Run:
    """Parse the output of `all_reduce_perf` and its relatives.

    Raises:
        UsageError: there is no line of results, or a line that cannot be read; there is more than one run; the line at
            the end of a run is missing; the output reports wrong data, but no line has any; or it does not name a
            collective other than all-reduce.
    """
    text = _TAG.sub("", text)
    ranks, starting = _RANK.findall(text), _STARTING.findall(text)
    if len(set(ranks)) < len(ranks) or len(starting) > 1:
        raise UsageError(
            "the output has more than one run; give the output of one program (if each process calls itself rank 0, "
            "nccl-tests was built without MPI)"
        )
    lines = tuple(
        Measured(
            size_bytes=int(match["size"]),
            gbytes_per_s=min(float(match["out"]), float(match["in"])),
            wrong=sum(round(float(match[name])) for name in ("out_wrong", "in_wrong") if match[name] != "N/A"),
        )
        for match in _LINE.finditer(text)
    )
    if unread := next((row[0] for row in _ROW.finditer(text) if not _LINE.fullmatch(row[0])), None):
        raise UsageError(
            f'a line of results cannot be read: "{unread.strip()}"; give the whole output as it was printed'
        )
    if not lines:
        raise UsageError("the output has no line of results of nccl-tests; give the whole output of all_reduce_perf")
    end = _END.search(text)
    if end is None:
        raise UsageError(
            'the output has no line "# Out of bounds values", so the run did not come to its end, and the sizes that '
            "are missing may be the slow ones; give the whole output, or run it again"
        )
    if "FAILED" in end["result"] and not any(line.wrong for line in lines):
        raise UsageError("the output ends with FAILED, and none of its lines has wrong elements; give the whole output")
    test = starting or _TEST.findall(text)
    if not test and any(match["redop"] == "none" or match["root"] != "-1" for match in _LINE.finditer(text)):
        raise UsageError("the output does not name its collective, which is no all-reduce; give the whole output")
    collective = (
        test[0].replace("_", "-").replace("alltoall", "all-to-all").replace("sendrecv", "send-recv") if test else None
    )
    return Run(collective=collective, ranks=len(ranks), lines=lines)


def compare(run: Run, table: Sequence[BusbwVars]) -> list[Shortfall]:
    """Return the sizes of a run that are slower than the table requires.

    Raises:
        UsageError: the table has no line for this collective and number of ranks.
    """
    collective = run.collective or "all-reduce"
    lines = sorted(
        (line for line in table if (line.collective, line.ranks) == (collective, run.ranks)),
        key=lambda line: line.size_bytes,
    )
    if not lines:
        known = ", ".join(sorted({f"{line.collective} of {line.ranks}" for line in table})) or "nothing"
        raise UsageError(f"faultbed_busbw has no line for {collective} of {run.ranks} ranks; it has {known}")
    if all(line.size_bytes < lines[0].size_bytes for line in run.lines):
        raise UsageError(
            f"every size of this run is below the table's first, {lines[0].size_bytes} bytes; measure larger ones"
        )
    return list(_shortfalls(run, lines, collective))


def _shortfalls(run: Run, lines: Sequence[BusbwVars], collective: str) -> Iterable[Shortfall]:
    for line in run.lines:
        where = f"{collective} of {run.ranks}, {line.size_bytes} bytes"
        if line.wrong:
            yield Shortfall(where=where, observed=f"{line.wrong} wrong elements", expected="none")
        bounds = [bound for bound in lines if bound.size_bytes <= line.size_bytes]
        if bounds and line.gbytes_per_s < bounds[-1].at_least_gbytes_per_s:
            expected = f"at least {bounds[-1].at_least_gbytes_per_s:g} GB/s (faultbed_busbw)"
            yield Shortfall(where=where, observed=f"busbw {line.gbytes_per_s:g} GB/s", expected=expected)
