"""One process of a program on a host, as a task of the traffic engine.

Its spec has the words of its command with placeholders, their values (the host adds `gid` and `attempt`), environment,
files, the reader of its progress, and how long it may take. Events, besides `sample`, `iteration` and `done`:

    ready {task, how}                              it listens, has made progress, or has had the time for it
    warm {task, at_ns, has_progress}               its first progress, or its end without any
    output {task, attempt, lines: [[ns, stream, text]]}
    queue_pairs {task, at_ns, listed}              whenever they change; `listed` null: they could not be read
    ended {task, attempt, at_ns, code, ...}        an end of the process, whether or not it is started again
"""

from __future__ import annotations

import base64
import contextlib
import os
import pty
import selectors
import shutil
import signal
import tempfile
import termios
import time

from faultbed.traffic.node.programs.foreign_qps import QueuePairs
from faultbed.traffic.node.programs.listening import listens
from faultbed.traffic.node.programs.output_lines import Limit, Lines
from faultbed.traffic.node.programs.placeholders import fill
from faultbed.traffic.node.programs.program_cgroup import ProgramCgroup
from faultbed.traffic.node.programs.readers import reader_of
from faultbed.traffic.node.programs.rnic_bytes import RnicBytes
from faultbed.traffic.node.series import BIN_NS
from faultbed.traffic.node.task import Task

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from typing import Any

    from faultbed.traffic.node.programs.readers import Step
    from faultbed.traffic.node.verbs import Rnic

__all__ = ["ProgramTask"]

_READ_BYTES = 1 << 16
_READS = 16
"""Reads of an output in a row, so that a program that floods it leaves time for the others."""
_QPS_NS = 200_000_000
"""Time between two looks at the queue pairs of the process."""
_OUTPUT_NS = 500_000_000
_TERM_NS = 5_000_000_000
"""How long a program has to end by itself after SIGTERM."""
_LEAVE_NS = 300_000_000
"""How long the other processes of a program have to end after the one that was started."""
_RESTART_NS = 500_000_000
"""Pause before a program that failed is started again."""
_MOST_BINS = 36_000
"""Most bins of one step: an hour."""


class ProgramTask(Task):
    """A process with all that it starts. The task is done when the process has ended and is not started again."""

    def __init__(
        self,
        name: str,
        rnic: Rnic,
        spec: dict[str, Any],
        emit: Callable[..., None],
        selector: selectors.BaseSelector,
    ) -> None:
        super().__init__(name, rnic, {"op_deadline_ms": 0, **spec}, emit)
        self._selector = selector
        program = spec["words"][0]
        if not spec["shell"] and "{" not in program and "/" not in program and shutil.which(program) is None:
            raise FileNotFoundError(f"{program} is not installed on this host; install it, or name the path of a file")
        self._folder = tempfile.mkdtemp(prefix="faultbed-program-")
        for file_name, content in spec["files"].items():
            self._write_file(file_name, base64.b64decode(content))
        self._cgroup: ProgramCgroup | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._outputs: dict[str, tuple[int, Lines]] = {}
        self._reader = reader_of(spec["progress"])
        self._counter = RnicBytes(rnic.name) if self._reader is None else None
        self._qps = QueuePairs(rnic.name)
        self._listed: list[Any] | None = []
        self._limit = Limit()
        self._kept: list[list[Any]] = []
        self._attempt = self._iterations = self._resolution_ns = 0
        self._began_ns = self._started_ns = self._looked_ns = self._sent_ns = self._term_ns = self._pidfd = 0
        self._restart_ns = 0
        self._is_warm = self._is_ready = self._is_stopping = self._timed_out = False

    def _write_file(self, name: str, content: bytes) -> None:
        path = os.path.join(self._folder, os.path.basename(name))
        with open(path, "wb") as file:
            file.write(content)
        os.chmod(path, 0o700)

    # Life of the process.

    def begin(self, now_ns: int) -> None:
        """Start the process for the first time."""
        if self.finished:  # it was stopped before
            return
        self._began_ns = now_ns
        self.running = True
        self._start(now_ns)

    def _start(self, now_ns: int) -> None:
        self._attempt += 1
        self._started_ns, self._restart_ns = now_ns, 0
        if self._reader is not None:
            self._reader = reader_of(self.spec["progress"])
        values = {**self.spec["values"], "gid": str(self.rnic.gid_index()), "attempt": str(self._attempt)}
        words = fill(self.spec["words"], values)
        if self.spec["shell"]:
            words = ["/bin/sh", "-c", words[0]]
        self._cgroup = ProgramCgroup(f"{os.getpid()}-{self.name}-{self._attempt}")
        master, slave = pty.openpty()  # programs write lines to a terminal as they come, and in blocks to a pipe
        _set_raw(slave)
        read_end, write_end = os.pipe()
        try:
            self._process = self._cgroup.start(
                words,
                stdout=slave,
                stderr=write_end,
                cwd=self.spec["directory"] or self._folder,
                env={**os.environ, "TERM": "dumb", **fill_values(self.spec["environment"], values)},
            )
        except BaseException:
            os.close(master)
            os.close(read_end)
            raise
        finally:
            os.close(slave)
            os.close(write_end)
        self._outputs = {"out": (master, Lines()), "err": (read_end, Lines())}
        for stream, (fd, _) in self._outputs.items():
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ, lambda stream=stream: self._readable(stream))
        self._pidfd = os.pidfd_open(self._process.pid)
        self._selector.register(self._pidfd, selectors.EVENT_READ, self._exited)

    def _exited(self) -> None:
        process, cgroup, now_ns = self._process, self._cgroup, time.monotonic_ns()
        if process is None or cgroup is None or process.poll() is None:
            return
        left = _left_in(cgroup)
        is_removed = self._release(now_ns)
        code = process.returncode
        self._send_output(now_ns)
        self.emit(
            "ended",
            task=self.name,
            attempt=self._attempt,
            start_ns=self._started_ns,
            at_ns=now_ns,
            code=code,
            stopped=self._is_stopping,
            timed_out=self._timed_out,
            left=left,
            removed=is_removed,
            cut_bytes=self._limit.cut_bytes,
        )
        may_restart = self.spec["restart"] == "on-failure" and self._attempt < self.spec["attempts"]
        if code and may_restart and not self._is_stopping:
            self._restart_ns = now_ns + _RESTART_NS
        else:
            self._finish(now_ns)

    def _release(self, now_ns: int) -> bool:
        """Read the rest of the output, end what is left of the program, and release what belongs to this attempt."""
        for stream in list(self._outputs):
            self._drain(stream, reads=1 << 10)
        if self._cgroup is None:
            return True
        is_removed = self._cgroup.close()
        for stream in list(self._outputs):
            self._drain(stream, reads=1 << 10)
            self._close_output(stream, now_ns)
        if self._pidfd:
            self._selector.unregister(self._pidfd)
            os.close(self._pidfd)
        self._pidfd = 0
        self._take([] if self._reader is None else self._reader.end(now_ns))
        self._cgroup = self._process = None
        self._report_qps(now_ns, [])
        return is_removed

    def _finish(self, now_ns: int) -> None:
        self.running, self.finished = False, True
        self._count(now_ns)
        self.sample(now_ns, last=True)
        self._mark_ready("ended")
        self._mark_warm(now_ns, has_progress=False)
        self.emit(
            "done",
            task=self.name,
            start_ns=self._began_ns,
            end_ns=now_ns,
            attempts=self._attempt,
            resolution_ns=self._resolution_ns,
        )

    def stop(self, now_ns: int) -> None:
        """Send SIGTERM to all processes of the program; SIGKILL follows after five seconds."""
        if self.finished or self._is_stopping:
            return
        self._is_stopping = True
        if self._cgroup is None:  # between two attempts, or not started
            self._finish(now_ns)
            return
        self._term_ns = now_ns
        self._cgroup.signal(signal.SIGTERM)

    def tick(self, now_ns: int) -> None:
        """Look at what no event reports: counters, queue pairs, sockets and deadlines."""
        if not self.running:
            return
        if self._restart_ns and now_ns >= self._restart_ns:
            self._start(now_ns)
        self._count(now_ns)
        if self._counter is not None:
            self.sample(now_ns)
        if self._cgroup is not None and now_ns - self._looked_ns >= _QPS_NS:
            self._looked_ns = now_ns
            pids = self._cgroup.processes()
            self._report_qps(now_ns, self._qps.of(pids))
            if not self._is_ready and (listens(pids) or self._is_warm):
                self._mark_ready("listens" if not self._is_warm else "progress")
            elif now_ns - self._began_ns > self.spec["ready_ms"] * 1_000_000:
                self._mark_ready("waited")
        if now_ns - self._sent_ns >= _OUTPUT_NS:
            self._send_output(now_ns)
        self._check_time(now_ns)

    def _check_time(self, now_ns: int) -> None:
        ran_ns = now_ns - self._began_ns
        if self._term_ns and self._cgroup is not None and now_ns - self._term_ns > _TERM_NS:
            self._cgroup.kill()
        elif not self._is_stopping and ran_ns > self.spec["timeout_ms"] * 1_000_000:
            self._timed_out = True
            self.stop(now_ns)

    # What the process shows.

    def _readable(self, stream: str) -> None:
        self._drain(stream, reads=_READS)

    def _drain(self, stream: str, *, reads: int) -> None:
        if stream not in self._outputs:
            return
        fd, lines = self._outputs[stream]
        for _ in range(reads):
            try:
                data = os.read(fd, _READ_BYTES)
            except BlockingIOError:
                return
            except OSError:  # the last process has closed the terminal
                data = b""
            now_ns = time.monotonic_ns()
            if not data:
                self._close_output(stream, now_ns)
                return
            self._lines(stream, lines.add(data), now_ns)

    def _close_output(self, stream: str, now_ns: int) -> None:
        if (output := self._outputs.pop(stream, None)) is not None:
            self._selector.unregister(output[0])
            os.close(output[0])
            self._lines(stream, output[1].end(), now_ns)

    def _lines(self, stream: str, lines: list[str], now_ns: int) -> None:
        if self._reader is not None:
            for line in lines:
                self._take(self._reader.line(line, now_ns))
        self._kept += [[now_ns, stream, line] for line in self._limit.keep(lines)]

    def _send_output(self, now_ns: int) -> None:
        self._sent_ns = now_ns
        if self._kept:
            kept, self._kept = self._kept, []
            self.emit("output", task=self.name, attempt=self._attempt, lines=kept)

    def _take(self, steps: list[Step]) -> None:
        for step in steps:
            if step.size_bytes:
                self._resolution_ns = max(self._resolution_ns, step.end_ns - step.start_ns)
                start_ns, sizes = _bins(step)
                self.emit("sample", task=self.name, start_ns=start_ns, sizes=sizes)
            if step.is_iteration:
                self.emit(
                    "iteration",
                    task=self.name,
                    index=self._iterations,
                    start_ns=step.start_ns,
                    end_ns=step.end_ns,
                    compute_ns=0,
                    comm_ns=step.end_ns - step.start_ns,
                    wait_ns=0,
                    wrong=step.wrong,
                )
                self._iterations += 1
            self._mark_warm(step.start_ns if step.size_bytes else step.end_ns)

    def _count(self, now_ns: int) -> None:
        if self._counter is not None and (size := self._counter.arrived()):
            if not self._is_warm:
                self.series.start(now_ns)
            self.series.add(now_ns, size)
            self._mark_warm(now_ns)

    def _report_qps(self, now_ns: int, listed: list[list[int | str]] | None) -> None:
        if _without_psns(listed) != _without_psns(self._listed):
            self.emit("queue_pairs", task=self.name, at_ns=now_ns, listed=listed)
        self._listed = listed

    def _mark_ready(self, how: str) -> None:
        if not self._is_ready:
            self._is_ready = True
            self.emit("ready", task=self.name, how=how)

    def _mark_warm(self, at_ns: int, *, has_progress: bool = True) -> None:
        if not self._is_warm:
            self._is_warm = True
            self.emit("warm", task=self.name, at_ns=at_ns, has_progress=has_progress)

    def close(self) -> None:
        """End the program and remove its files."""
        self.running = False
        self._release(time.monotonic_ns())
        self._qps.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        super().close()


def _left_in(cgroup: ProgramCgroup) -> int:
    """Return how many processes outlive the one that was started. Those that are just ending do not count."""
    deadline_ns = time.monotonic_ns() + _LEAVE_NS
    while (left := len(cgroup.processes())) and time.monotonic_ns() < deadline_ns:
        time.sleep(0.01)
    return left


def fill_values(environment: dict[str, str], values: dict[str, str]) -> dict[str, str]:
    """Return an environment with the values of the placeholders in it."""
    return dict(zip(environment, fill(environment.values(), values), strict=True))


def _set_raw(terminal: int) -> None:
    """Make a terminal pass bytes on as they are: no carriage returns, and no echo."""
    with contextlib.suppress(termios.error):
        attributes = termios.tcgetattr(terminal)
        attributes[1] &= ~termios.OPOST
        attributes[3] &= ~(termios.ECHO | termios.ICANON)
        termios.tcsetattr(terminal, termios.TCSANOW, attributes)


def _bins(step: Step) -> tuple[int, list[int]]:
    """Return the begin of the first bin, and the bytes of each: those of a step, spread evenly over its time."""
    first, last = step.start_ns // BIN_NS, max(step.start_ns, step.end_ns - 1) // BIN_NS
    last = min(last, first + _MOST_BINS - 1)
    count = last - first + 1
    length_ns = max(1, step.end_ns - step.start_ns)
    ends = [min(step.end_ns, (first + index + 1) * BIN_NS) - step.start_ns for index in range(count)]
    totals = [step.size_bytes * end_ns // length_ns for end_ns in ends[:-1]] + [step.size_bytes]
    return first * BIN_NS, [total - before for total, before in zip(totals, [0, *totals[:-1]], strict=True)]


def _without_psns(listed: list[list[int | str]] | None) -> list[list[int | str]] | None:
    return None if listed is None else [[*entry[:2], *entry[4:]] for entry in listed]
