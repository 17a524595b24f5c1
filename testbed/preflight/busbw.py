"""Compare the output of nccl-tests with the lab's table `faultbed_busbw`. Pure.

busbw is that of nccl-tests (doc/PERFORMANCE.md): comparable with the link speed at any number of ranks. A size between
two lines of the table must reach the lower line's value. A size below all lines is not judged, because latency
dominates there. Not yet run on hardware; the formats are those of nccl-tests (src/util.cu) and rccl-tests
(src/common.cu).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from faultbed.testbed.errors import UsageError
from faultbed.testbed.inventory.schema import BusbwVars

__all__ = ["Measured", "Run", "Shortfall", "compare", "read"]

_SPACE = r"[^\S\n]"
"""White space within a line: where it may be a line end, too, many empty lines take quadratic time."""
_TAG = re.compile(rf"^(?:\[[^\]\s]+\](?:<std(?:out|err)>)?: ?|{_SPACE}*[0-9]+: |\[[0-9]+\] )", re.MULTILINE)
"""Prefix of each line: `[1,0]<stdout>:` of mpirun --tag-output, `[job@1,0]<stdout>:` of PRRTE, `12: ` of srun --label,
`[12] ` of MPICH's -prepend-rank."""
_RANK = re.compile(r"^#\s+Rank\s+(?P<rank>[0-9]+) (?:\s*Group\s+(?P<group>[0-9]+) )?", re.MULTILINE)
_CUT_RANKS = re.compile(r"^#\s+Rank.*\.\.\.$", re.MULTILINE)
"""A process's list of devices is cut at 2,048 characters (src/util.cu, writeDeviceReport)."""
_COLLECTIVES = (
    "all_reduce|all_gather|reduce_scatter|alltoallv|alltoall|broadcast|reduce|sendrecv|gather|scatter|hypercube"
)
_NAME = rf"({_COLLECTIVES})_perf"
_TEST = re.compile(_NAME)
_STARTING = re.compile(rf"^#\s*Collective test starting: {_NAME}", re.MULTILINE)
_ROW = re.compile(rf"^{_SPACE}*[0-9]+{_SPACE}+[0-9]+{_SPACE}+\w+{_SPACE}+\w+{_SPACE}+-?[0-9]+{_SPACE}.*$", re.MULTILINE)
"""A line that begins like a row of results: size, count, type, redop, root."""
_TIMESTAMP = re.compile(r"\s+[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}\s*$")
"""What `-S` appends to a row."""
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:e\+[0-9]+)?")
"""As getFloatStr prints times and rates, and %g a number of wrong elements: 10 s and more are `1.2e+07` us."""
_PER_ITERATION = re.compile(r"^#.*\bi_min\b.*\bi_cv%", re.MULTILINE)
"""The header of `-I`, which adds four columns to each half of a row."""
_CPU_TIME = re.compile(r"^#.*\bcputime\b", re.MULTILINE)
"""The header of `-C`: times are those of the CPU, and the rates say nothing about the network."""
_CSV = re.compile(r"^[^#\n]*\bsize\b[^\n]*,[^\n]*busbw", re.MULTILINE | re.IGNORECASE)
_END = re.compile(rf"^#?{_SPACE}*Out of bounds values{_SPACE}*:(?P<result>.*)", re.MULTILINE)
"""The end of the output of every run that came to its end (src/common.cu)."""
_HALF, _HALF_PER_ITERATION, _HALVES = 4, 8, (1, 2)
"""Columns of the half of a row: time, algbw, busbw, #wrong, and with `-I` the least, the largest, p99 and cv."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One line of nccl-tests: the slower of out-of-place and in-place, GB/s (10^9 bytes), and wrong elements.

    `wrong` is None if the data were not checked (`-c 0`). `names_all_reduce`: its reduction and root are those of an
    all-reduce.
    """

    size_bytes: int
    gbytes_per_s: float
    wrong: int | None
    names_all_reduce: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One program's output: the collective (None: unknown), the number of ranks, and its lines.

    With NCCL_TESTS_SPLIT, several groups run the collective at once; `ranks` is the size of each.
    """

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
    """Parse the output of `all_reduce_perf` and its relatives, of nccl-tests or rccl-tests: text, or JSON of `-J`.

    Raises:
        UsageError: there is no line of results, or a line that cannot be read; there is more than one run, or its
            groups differ in size; the end of the run is missing; the output reports wrong data, but no line has any;
            or it does not name a collective other than all-reduce.
    """
    if text.lstrip().startswith("{"):
        return _read_json(text)
    text = _TAG.sub("", text)
    ranks, starting = list(_RANK.finditer(text)), _STARTING.findall(text)
    if len({match["rank"] for match in ranks}) < len(ranks) or len(starting) > 1:
        raise UsageError(
            "the output has more than one run; give the output of one program (if each process calls itself rank 0, "
            "nccl-tests was built without MPI)"
        )
    if _CUT_RANKS.search(text):
        raise UsageError(
            "the output's list of ranks is cut short, as nccl-tests does; run it with fewer GPUs a process"
        )
    if _CPU_TIME.search(text):
        raise _cpu_time()
    is_per_iteration = _PER_ITERATION.search(text) is not None
    lines = tuple(_measured(row[0], is_per_iteration=is_per_iteration) for row in _ROW.finditer(text))
    if not lines and _CSV.search(text):
        raise UsageError(
            "CSV of rccl-tests is not read; give the text that the program prints, or JSON of nccl-tests -J"
        )
    end = _END.search(text)
    return _checked(
        lines,
        names=starting or _TEST.findall(text),
        ranks=_group_size(match["group"] or "0" for match in ranks),
        outcome=None if end is None else "FAILED" not in end["result"],
    )


def _measured(row: str, *, is_per_iteration: bool) -> Measured:
    """Parse a row: five columns, then one or two halves, then perhaps a timestamp. Trace replays have one half."""
    columns = _TIMESTAMP.sub("", row).split()
    half = _HALF_PER_ITERATION if is_per_iteration else _HALF
    halves = [columns[at : at + half] for at in range(5, len(columns), half)]
    if len(halves) not in _HALVES or any(
        len(part) != half or not all(map(_NUMBER.fullmatch, part[:3])) for part in halves
    ):
        raise _unread(row)
    wrong = [part[3] for part in halves if part[3] != "N/A"]
    if not all(map(_NUMBER.fullmatch, wrong)):
        raise _unread(row)
    return Measured(
        size_bytes=int(columns[0]),
        gbytes_per_s=min(float(part[2]) for part in halves),
        wrong=sum(round(float(count)) for count in wrong) if wrong else None,
        names_all_reduce=columns[3] != "none" and columns[4] == "-1",
    )


def _cpu_time() -> UsageError:
    return UsageError("the output's rates are of CPU time (-C), not of transfers; run the program without -C")


def _unread(row: str) -> UsageError:
    return UsageError(f'a line of results cannot be read: "{row.strip()}"; give the whole output as it was printed')


def _group_size(groups: Iterable[str]) -> int:
    sizes = Counter(groups)
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{count} ranks in group {name}" for name, count in sorted(sizes.items()))
        raise UsageError(f"the run's groups differ in size ({shown}), so its lines are of no one number of ranks")
    return next(iter(sizes.values()), 0)


class _Half(msgspec.Struct, frozen=True):
    bus_bw: float
    nwrong: float | None
    cpu_time: float | None = None


class _Row(msgspec.Struct, frozen=True):
    size: int
    redop: str
    root: str
    out_of_place: _Half | None = None
    in_place: _Half | None = None
    experiment_name: str = ""


class _Device(msgspec.Struct, frozen=True):
    rank: int
    group: int = 0


class _Config(msgspec.Struct, frozen=True):
    devices: list[_Device] = []


class _Bounds(msgspec.Struct, frozen=True):
    count: int


class _Output(msgspec.Struct, frozen=True):
    """What `-J` writes (src/util.cu, JSON_FILE_VERSION 2). A run that did not end has no `out_of_bounds`."""

    results: list[_Row]
    config: _Config = _Config()
    args: list[str] = []
    out_of_bounds: _Bounds | None = None


def _read_json(text: str) -> Run:
    try:
        output = msgspec.json.decode(text.encode(errors="replace"), type=_Output)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(
            f"the JSON is not the whole of what nccl-tests -J writes, or has a number that is none: {error}; give the "
            "whole file"
        ) from error
    lines = []
    for row in output.results:
        halves = [half for half in (row.out_of_place, row.in_place) if half is not None]
        if any(half.cpu_time is not None for half in halves):
            raise _cpu_time()
        if not halves or not all(math.isfinite(half.bus_bw) for half in halves):
            raise UsageError(f"the result of {row.size} bytes has no bus_bw; give the whole file")
        wrong = [round(half.nwrong) for half in halves if half.nwrong is not None]
        lines.append(
            Measured(
                size_bytes=row.size,
                gbytes_per_s=min(half.bus_bw for half in halves),
                wrong=sum(wrong) if wrong else None,
                names_all_reduce=row.redop != "none" and row.root.strip() == "-1",
            )
        )
    named = (*(row.experiment_name for row in output.results), *output.args[:1])
    names = [match for name in named if (match := _TEST.search(name)) is not None]
    if len({match[1] for match in names}) > 1:
        raise UsageError("the output has more than one collective; give the output of one program")
    if len({device.rank for device in output.config.devices}) < len(output.config.devices):
        raise UsageError("the output names a rank twice; nccl-tests was built without MPI")
    return _checked(
        tuple(lines),
        names=[match[1] for match in names[:1]],
        ranks=_group_size(str(device.group) for device in output.config.devices),
        outcome=None if output.out_of_bounds is None else output.out_of_bounds.count == 0,
    )


def _checked(lines: tuple[Measured, ...], *, names: Sequence[str], ranks: int, outcome: bool | None) -> Run:
    """Return the run if its output is whole. `outcome`: whether the run says that its data is right; None: no end."""
    if not lines:
        raise UsageError("the output has no line of results of nccl-tests; give the whole output of all_reduce_perf")
    if outcome is None:
        raise UsageError(
            'the output has no line "# Out of bounds values", so the run did not come to its end, and the sizes that '
            "are missing may be the slow ones; give the whole output, or run it again"
        )
    if not outcome and not any(line.wrong for line in lines):
        raise UsageError("the output ends with FAILED, and none of its lines has wrong elements; give the whole output")
    if not names and not all(line.names_all_reduce for line in lines):
        raise UsageError("the output does not name its collective, which is no all-reduce; give the whole output")
    spelled = {"alltoall": "all-to-all", "alltoallv": "all-to-allv", "sendrecv": "send-recv"}
    collective = spelled.get(names[0], names[0].replace("_", "-")) if names else None
    return Run(collective=collective, ranks=ranks, lines=lines)


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
