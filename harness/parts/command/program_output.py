"""What programs printed: `output/<process>.txt` of a run directory, a line for each of theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from faultbed.harness.record.run_files import whole
from faultbed.traffic.programs.program_results import OutputLine

__all__ = ["FOLDER", "write"]

FOLDER = "output"


def write(run_dir: Path, output: Mapping[str, Sequence[OutputLine]], *, t0_ns: int) -> None:
    """Write the lines of each process with their times.

    A line has the seconds since the workload's start, the attempt, the stream (`out` or `err`) and the text, with tabs
    between them. Control characters in the text are escaped: a terminal that shows the file cannot be controlled by it.

    Raises:
        OSError: a file cannot be written.
    """
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    for name, lines in output.items():
        with whole(folder / f"{name}.txt") as temporary:
            temporary.write_text("".join(_line(line, t0_ns) for line in lines), encoding="utf-8")


def _line(line: OutputLine, t0_ns: int) -> str:
    text = "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in line.text)
    return f"{(line.time_ns - t0_ns) / 1e9:.3f}\t{line.attempt}\t{line.stream}\t{text}\n"
