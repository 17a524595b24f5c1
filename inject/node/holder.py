"""Hold one fault on its target for as long as its controller lives, and no longer.

The protocol is JSON lines on stdin and stdout. Each request gets exactly one answer, with the request's `seq`, if any.
Two messages answer no request: `ready` at the start, and the answer to `clear` once more at the end. Times are this
machine's CLOCK_MONOTONIC in ns.

    at the start                        {"event":"ready","monotonic_ns":N}
    {"do":"clock"}                      {"event":"clock","monotonic_ns":N}
    {"do":"prepare", ...}               {"event":"prepared","before":{...},"revert":"..."}
    {"do":"arm","at_ns":N?,"qp"?,"psn"?,"ahead"?} {"event":"scheduled"} or {"event":"armed","at_ns":N,"readback":{...}}
    {"do":"update","args":{...}}        {"event":"updated","at_ns":N,"readback":{...}}
    {"do":"observe"}                    {"event":"observed","state":"prepared|scheduled|active|over","count":N,...}
    {"do":"beat"}                       {"event":"beat","state":"idle|prepared|scheduled|active|over"}
    {"do":"clear"}                      {"event":"cleared","ok":bool,"at_ns":N,"readback":{...},"observed":{...}}
    an error                            {"event":"error","error":"...","where":"..."}

The revert is stored on disk before the change, and removed only after the readback shows that the change is gone. PID 1
(by ExecStopPost), the guardian and `faultbed heal` may run it any number of times.

The holder itself reverts at the end of the window, at the end of stdin, on SIGTERM, when its guardian is gone, and when
the controller has been silent for longer than the lease. If the holder is killed or stopped (SIGKILL, SIGSTOP), PID 1
or the guardian reverts.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any

from faultbed.inject.node.actuator import Actuator, Refused, make
from faultbed.inject.node.claim import Claim
from faultbed.inject.node.command import call_on_heartbeat
from faultbed.testbed.node.holders import HELD_BY, identity

__all__ = ["Holder", "main"]

REVERT_DIR = "/run/faultbed/faults"
_WATCHDOG_EVERY_NS = 500_000_000
_PRIORITY = 10


class _Hits:
    """The number and the times of a fault's hits so far.

    `none_before_ns` is the latest time before which there was certainly no hit: when the last poll without hits began,
    or when the change began that turned the fault on.
    """

    def __init__(self) -> None:
        self.count = 0
        self.first_ns: int | None = None
        self.last_ns: int | None = None
        self.between_ns: list[int] | None = None  # the earliest and the latest possible time of the first hit
        self.none_before_ns = 0

    def poll(self, counted: int, begin_ns: int) -> None:
        """Record the result of a poll that began at `begin_ns`. New hits get that time."""
        if counted > self.count:
            self._note_first(begin_ns, [self.none_before_ns, time.monotonic_ns()])
            self.count, self.last_ns = counted, begin_ns
        elif not counted:
            self.none_before_ns = begin_ns

    def add_edge(self, begun_ns: int, done_ns: int) -> None:
        """Count a change that turned on a fault whose edges are its hits."""
        self.count += 1
        self._note_first(begun_ns, [begun_ns, done_ns])

    def _note_first(self, at_ns: int, between_ns: list[int]) -> None:
        if self.first_ns is None:
            self.first_ns, self.between_ns = at_ns, between_ns

    def describe(self) -> dict[str, Any]:
        """Return the fields of the answer to `observe`."""
        return {
            "count": self.count,
            "first_ns": self.first_ns,
            "last_ns": self.last_ns,
            "between_ns": self.between_ns,
        }


class _Edge:
    """A change that was made at `at_ns`, and its readback."""

    def __init__(self, at_ns: int, *, on: bool, readback: dict[str, Any]) -> None:
        self.at_ns, self.on, self.readback = at_ns, on, readback

    @property
    def is_confirmed(self) -> bool:
        """Whether the readback shows the change."""
        return bool(self.readback["applied"] == self.on)


class Holder:
    """One fault and its state: idle, prepared, scheduled (armed for a later time), active, over."""

    def __init__(self, out: int, watchdog: _Watchdog) -> None:
        self.out = out
        self.watchdog = watchdog
        self.state = "idle"
        self.ttl_ns = 10 * 10**9
        self.heard_ns = time.monotonic_ns()
        self.planned: list[tuple[int, bool]] = []  # edges that are still to be made, as (ns after the start, on)
        self.window_ns = 0
        self.start_ns = 0
        self.end_ns = 0
        self.late_ns = 0
        self.clear_ns: int | None = None  # when a `clear` request ended the window
        self.done: list[_Edge] = []
        self.changes: list[list[Any]] = []  # [begin, end, on] of each confirmed edge
        self.revert_file = ""
        self.claim: Claim | None = None
        self.actuator: Actuator | None = None
        self.is_on = False
        self.is_lost = False  # something else had ended the fault before it was to be removed
        self.unread: str | None = None  # why its state could not be read just before it was removed
        self.next_loss_check_ns = 0
        self.is_ending = False  # `off` was called: if the fault is gone now, the holder itself has ended it
        self.is_set_up = False
        self.hits = _Hits()
        self.next_poll_ns = 0
        self.failure: str | None = None
        self.cleared: dict[str, Any] | None = None

    # Requests of the controller

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out a request and return the answer."""
        self.heard_ns = time.monotonic_ns()
        do = str(request.get("do"))
        try:
            if do == "clock":
                return {"event": "clock", "monotonic_ns": time.monotonic_ns()}
            if do == "beat":
                return {"event": "beat", "state": self.state}
            handlers = {
                "prepare": self.do_prepare,
                "arm": self.do_arm,
                "update": self.do_update,
                "observe": self.do_observe,
                "clear": self.do_clear,
            }
            if do in handlers:
                return handlers[do](request)
        except (Refused, OSError, ValueError, KeyError, TypeError, ImportError) as error:
            return {"event": "error", "error": f"{error}", "where": do, "refused": isinstance(error, Refused)}
        finally:
            self.heard_ns = time.monotonic_ns()
        return {"event": "error", "error": f"unknown request {do!r}", "where": do}

    def do_prepare(self, request: dict[str, Any]) -> dict[str, Any]:
        """Claim what the fault changes, check the target, and store its present state. Nothing is changed yet."""
        if self.state != "idle":
            raise Refused(f"already {self.state}")
        self.revert_file = f"{request.get('revert_dir') or REVERT_DIR}/{request['id']}.revert"
        self.claim = Claim.acquire(self.revert_file, request.get("claim") or {})
        try:
            _refuse_after_heal(request.get("healed"))
            return self._prepare_claimed(request)
        except BaseException:
            self.claim.release()
            raise

    def _prepare_claimed(self, request: dict[str, Any]) -> dict[str, Any]:
        """Make the actuator and let it check the target. The claim is held already."""
        actuator = make(request["actuator"], request["args"])
        call_on_heartbeat(self._heartbeat)
        if request.get("mutate"):
            from faultbed.inject.node.mutant import Mutant  # noqa: PLC0415 - only in tests of the harness itself

            actuator = Mutant(actuator, request["mutate"])
        before = actuator.prepare()
        self.planned = [(int(at_s * 1e9), bool(on)) for at_s, on in request["edges"]]
        self.window_ns = int(request["window_s"] * 1e9)
        self.ttl_ns = int(request["ttl_s"] * 1e9)
        self.actuator = actuator
        self.state = "prepared"
        return {"event": "prepared", "before": before, "revert": actuator.revert_script()}

    def _heartbeat(self) -> None:
        self.watchdog.heartbeat(time.monotonic_ns())

    def do_arm(self, request: dict[str, Any]) -> dict[str, Any]:
        """Arm the fault, now or at a time of this machine's clock."""
        if self.state != "prepared" or self.actuator is None:
            raise Refused(f"cannot arm a fault that is {self.state}")
        self.actuator.bind(qp=request.get("qp"), psn=request.get("psn"), ahead=request.get("ahead"))
        if self.claim is not None:
            self.claim.check()
        self.store_revert()
        self.watchdog.raise_priority()
        # Some changes take a while by themselves, which must not trip the watchdog.
        self.watchdog.shorten(max(1.0, self.ttl_ns / 2e9, self.actuator.patience_s))
        if self.actuator.uses_set_up:
            self.is_set_up = True
            self.actuator.set_up()
        # A late request still gets its whole window, which then begins now: a shorter window would be another fault.
        now_ns = time.monotonic_ns()
        requested_ns = int(request.get("at_ns") or now_ns)
        self.late_ns = max(0, now_ns - requested_ns)
        self.start_ns = max(requested_ns, now_ns)
        self.end_ns = self.start_ns + self.window_ns
        self.state = "scheduled"
        self.due(time.monotonic_ns())
        if self.state == "scheduled":
            return {"event": "scheduled", "at_ns": self.start_ns}
        if self.failure:
            raise OSError(self.failure)
        return self.armed()

    def armed(self) -> dict[str, Any]:
        """Return the answer to `arm` once the first edge is made."""
        first = self.done[0]
        return {"event": "armed", "at_ns": first.at_ns, "readback": first.readback, "late_ns": self.late_ns}

    def do_observe(self, _request: dict[str, Any]) -> dict[str, Any]:
        """Return the observation of the fault so far."""
        self.sample_if_on()
        first = self.done[0] if self.done else None
        return {
            "event": "observed",
            "state": self.state,
            "on": self.is_on,
            **self.hits.describe(),
            "passed": self.actuator.passed() if self.actuator is not None else None,
            "edges": [[edge.at_ns, edge.on] for edge in self.done if edge.is_confirmed],
            "changes": self.changes,
            "late_ns": self.late_ns,
            "clear_ns": self.clear_ns,
            "lost": self.is_lost,
            "unread": self.unread,
            "unseen": self.actuator.loss_unknown_why if self.actuator is not None else None,
            "patience_s": self.actuator.patience_s if self.actuator is not None else 0.0,
            "armed_at_ns": first.at_ns if first is not None else None,
            "armed_readback": first.readback if first is not None else None,
            "failure": self.failure,
        }

    def do_update(self, request: dict[str, Any]) -> dict[str, Any]:
        """Change what is on, and read it back. If that fails, it stays on as far as it was changed."""
        if not self.is_on or self.actuator is None:
            raise Refused(f"cannot update what is {self.state}")
        self.actuator.update(**request["args"])
        return {"event": "updated", "at_ns": time.monotonic_ns(), "readback": self.actuator.read()}

    def do_clear(self, _request: dict[str, Any]) -> dict[str, Any]:
        """Revert and read back; a repeated request gets the same answer, unless the first attempt failed."""
        if self.state in ("scheduled", "active"):
            self.clear_ns = time.monotonic_ns()
        self.finish()
        return {**(self.cleared or {}), "observed": self.do_observe({})}

    # Timed work

    def due(self, now_ns: int) -> None:
        """Do what is due: edges, the end of the window, a poll of the hits, a check whether the fault is lost."""
        now_ns = self._make_due_edges(now_ns)
        if self.state == "active" and now_ns >= self.end_ns:
            self.finish()
        actuator = self.actuator
        if actuator is None:
            return
        poll_s = actuator.poll_s  # read only once: the value of a routing scheme changes during `tick`
        if self.is_on and poll_s and now_ns >= self.next_poll_ns:
            begin_ns = time.monotonic_ns()
            self.tick(begin_ns)
            self.sample(begin_ns)
            self.next_poll_ns = _next_reading_ns(begin_ns, time.monotonic_ns(), poll_s)
        if self.is_on and actuator.loss_check_s and now_ns >= self.next_loss_check_ns:
            begin_ns = time.monotonic_ns()
            self.check_for_loss()
            self.next_loss_check_ns = _next_reading_ns(begin_ns, time.monotonic_ns(), actuator.loss_check_s)

    def _make_due_edges(self, now_ns: int) -> int:
        """Make the edges that are due at `now_ns`. Return the time afterwards."""
        while self.state in ("scheduled", "active") and self.planned:
            at_ns, on = self.planned[0]
            if self.start_ns + at_ns > now_ns:
                break
            self.planned.pop(0)
            if not self.done:  # a late holder moves its whole window, instead of shortening it
                self.start_ns = max(self.start_ns, time.monotonic_ns())
                self.end_ns = self.start_ns + self.window_ns
            self.edge(on=on)
            now_ns = time.monotonic_ns()
        return now_ns

    def tick(self, now_ns: int) -> None:
        """Let the actuator update a change that varies over time."""
        if self.actuator is not None:
            try:
                self.actuator.tick(now_ns)
            except OSError as error:
                self.failure = str(error)
                self.finish()

    def files(self) -> list[int]:
        """Return the descriptors that the actuator waits for while the fault is on."""
        return list(self.actuator.files) if self.actuator and self.is_on else []

    def edge(self, *, on: bool) -> None:
        """Turn the fault on or off, and read the change back. An error ends the fault."""
        if self.actuator is None:
            return
        try:
            if on:
                self._turn_on(self.actuator)
            else:
                self._turn_off(self.actuator)
        except (OSError, Refused) as error:
            self.failure = str(error)
            self.state = "active"
            self.finish()

    def _turn_on(self, actuator: Actuator) -> None:
        self.is_on, self.is_ending = True, False
        begun_ns = self.hits.none_before_ns = time.monotonic_ns()
        actuator.on()
        done_ns = time.monotonic_ns()
        # The readback takes longer than the first packet: sample before it, for an exact first hit.
        self.sample(time.monotonic_ns())
        readback = actuator.read()
        self.state = "active"
        self.record(begun_ns, done_ns, on=True, readback=readback)
        if not self.planned and len(self.done) == 1:
            # A fault with one change is on for the whole window, however long the change itself took.
            self.end_ns = done_ns + self.window_ns
        if actuator.hits() is None and readback["applied"]:
            self.hits.add_edge(begun_ns, done_ns)

    def _turn_off(self, actuator: Actuator) -> None:
        self.sample_if_on()
        begun_ns = time.monotonic_ns()
        self.remove()
        done_ns = time.monotonic_ns()
        self.is_on = False
        readback = actuator.read()
        self.state = "active"
        self.record(begun_ns, done_ns, on=False, readback=readback)

    def record(self, begun_ns: int, done_ns: int, *, on: bool, readback: dict[str, Any]) -> None:
        """Record a change and its readback.

        The time of an `on` is that before the change, and the time of an `off` that after it. Together they span every
        effect of the fault.
        """
        edge = _Edge(begun_ns if on else done_ns, on=on, readback=readback)
        self.done.append(edge)
        if edge.is_confirmed:
            self.changes.append([begun_ns, done_ns, on])

    def sample_if_on(self) -> None:
        """Read the hits if the fault is on. Without a counter, the last reading before an `off` is the last hit."""
        if self.is_on:
            self.sample(time.monotonic_ns())

    def sample(self, begin_ns: int) -> None:
        """Read the hits. `begin_ns` is when this reading began."""
        if self.actuator is None:
            return
        counted = self.actuator.hits()
        if counted is not None:
            self.hits.poll(counted, begin_ns)
        elif self.hits.count:
            self.hits.last_ns = begin_ns

    def finish(self) -> None:
        """Revert, read back, and remove the stored revert if everything is restored.

        It never raises: if something is left, the stored revert stays, and PID 1 or the guardian runs it. After a
        success a second call does nothing, because another fault may have changed the same things by now.
        """
        if self.cleared is not None and self.cleared["ok"]:
            return
        if self.actuator is None:
            self.state, self.cleared = "over", {"event": "cleared", "ok": True, "at_ns": None, "readback": {}}
            return
        readback: dict[str, Any] = {}
        try:
            if self.is_on or self.failure or self.is_set_up:
                self._undo(self.actuator)
            readback = self.actuator.read()
            is_clear = not readback["applied"] and readback.get("gone", True)
            if is_clear:
                self.remove_revert()
                if self.claim is not None:
                    self.claim.release()
        except (OSError, Refused, KeyError) as error:
            self.failure, is_clear = str(error), False
        at_ns = time.monotonic_ns()
        self.state = "over"
        self.cleared = {"event": "cleared", "ok": is_clear, "at_ns": at_ns, "readback": readback}
        if not is_clear:
            self.cleared["error"] = self.failure or "the change is still there"

    def _undo(self, actuator: Actuator) -> None:
        """Undo `on` and `set_up`, whichever of them were called, even if they failed."""
        self.sample_if_on()
        begun_ns = time.monotonic_ns()
        self.remove()
        self.is_set_up = False
        done_ns, was_on, self.is_on = time.monotonic_ns(), self.is_on, False
        if was_on:
            self.record(begun_ns, done_ns, on=False, readback=actuator.read())
        if actuator.poll_s:
            # The rule is gone, so that the hop's count is final.
            self.sample(time.monotonic_ns())

    def remove(self) -> None:
        """Check whether the fault is still on, then turn it off. Callers count the check as part of the removal."""
        if self.actuator is None:
            return
        should_be_on = self.is_on_by_readback and not self.is_ending
        self.check_for_loss()
        self.is_ending = True
        self.actuator.off()
        self.is_lost = self.is_lost or (should_be_on and self.actuator.was_lost)

    @property
    def is_on_by_readback(self) -> bool:
        """Whether the fault should be on, and was on when the last change was read back."""
        return bool(self.is_on and self.done and self.done[-1].readback["applied"])

    def end(self) -> None:
        """Revert without a check for loss: the controller is gone, and a check that hangs must not delay the revert."""
        self.is_ending = True
        self.finish()

    def check_for_loss(self) -> None:
        """Note whether something else has ended the fault; a later check does not take that back.

        A state that cannot be read is noted (`unread`), and is no reason to keep the fault.
        """
        if self.actuator is None or not self.is_on_by_readback or self.is_ending or self.actuator.loss_unknown_why:
            return
        try:
            self.is_lost = bool(self.actuator.is_lost()) or self.is_lost
            self.unread = None
        except (OSError, Refused, KeyError, ValueError) as error:
            self.unread = f"{error}" or type(error).__name__

    def wait_s(self, now_ns: int) -> float:
        """Return the seconds until the next edge, poll, check, heartbeat or end of the lease is due."""
        moments = [self.heard_ns + self.ttl_ns, now_ns + _WATCHDOG_EVERY_NS]
        if self.state in ("scheduled", "active"):
            moments += [self.start_ns + at_ns for at_ns, _ in self.planned[:1]]
            moments.append(self.end_ns)
            if self.is_on and self.actuator is not None and self.actuator.poll_s:
                moments.append(self.next_poll_ns)
            if self.is_on and self.actuator is not None and self.actuator.loss_check_s:
                moments.append(self.next_loss_check_ns)
        return max(0.0, (min(moments) - now_ns) / 1e9)

    # The stored revert

    def store_revert(self) -> None:
        """Write the revert to disk before the change, atomically."""
        if self.actuator is None:
            return
        os.makedirs(os.path.dirname(self.revert_file), exist_ok=True)  # noqa: PTH103, PTH120 - start-up time
        temporary = f"{self.revert_file}.new"
        with open(temporary, "w", encoding="utf-8") as file:  # noqa: PTH123
            # `heal` ends the holder first, even if it has no claim.
            file.write(f"{self.actuator.revert_script()}\n{HELD_BY}{json.dumps(identity(os.getpid()))}\n")
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, self.revert_file)  # noqa: PTH104

    def remove_revert(self) -> None:
        """Remove the stored revert: the change is gone."""
        if self.revert_file and os.path.exists(self.revert_file):  # noqa: PTH110
            os.unlink(self.revert_file)  # noqa: PTH108


def _next_reading_ns(begin_ns: int, end_ns: int, every_s: float) -> int:
    """Return when to read again after a reading. Readings take at most a twentieth of the time, to disturb little."""
    return end_ns + max(int(every_s * 1e9), 19 * (end_ns - begin_ns))


class _Watchdog:
    """Reports to the supervisor that this process is alive: systemd (sd_notify(3)), or the guardian by a pipe."""

    def __init__(self) -> None:
        self._path = os.environ.pop("NOTIFY_SOCKET", "")
        self._pipe = int(os.environ.pop("FAULTBED_WATCH_FD", "-1"))
        self._last_ns = 0

    def ready(self) -> None:
        """Report that the holder serves requests."""
        self._notify(b"READY=1")

    def shorten(self, seconds: float) -> None:
        """Shorten the watchdog's timeout once there is something to revert."""
        self._notify(f"WATCHDOG_USEC={seconds * 1e6:.0f}\nWATCHDOG=1".encode())

    def raise_priority(self) -> None:
        """Make edges punctual on a switch whose CPU forwards packets all the time.

        This happens only once the fault is armed, and child processes do not inherit it. An interpreter that starts
        with this priority, or a restarted daemon, would stop the forwarding for seconds.
        """
        if self._path:
            os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(_PRIORITY))

    def heartbeat(self, now_ns: int) -> None:
        """Report to the supervisor, at most twice a second."""
        if now_ns - self._last_ns >= _WATCHDOG_EVERY_NS:
            self._last_ns = now_ns
            self._notify(b"WATCHDOG=1")

    def _notify(self, message: bytes) -> None:
        try:
            if self._path:
                name = f"\0{self._path[1:]}" if self._path.startswith("@") else self._path
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
                    notify.sendto(message, name)
            if self._pipe >= 0:
                os.write(self._pipe, b".")
        except OSError:
            pass


def _refuse_after_heal(healed: dict[str, str] | None) -> None:
    """Refuse to prepare if `heal` was run after this holder was started: `heal` may not have seen its claim.

    `heal` writes its file before it searches for claims; the holder claims before it reads the file. One of them
    therefore sees the other. `healed` names the file, and what it held when the holder was started.

    Raises:
        Refused: `heal` was run.
    """
    if healed is None:
        return
    content = ""
    with contextlib.suppress(OSError), open(healed["file"], encoding="ascii") as file:  # noqa: PTH123 - start-up time
        content = file.read()
    if content != healed["said"]:
        raise Refused("`faultbed heal` was run while this fault was prepared; start it again")


def main() -> int:
    """Serve until the holder must end, then revert. Return 0 if nothing of the fault is left, otherwise 1."""
    watchdog = _Watchdog()
    holder = Holder(1, watchdog)
    stop_r, stop_w = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: os.write(stop_w, b"."))
    guard = int(os.environ.pop("FAULTBED_GUARD_FD", "-1"))
    endings = {stop_r, *([guard] if guard >= 0 else [])}
    watchdog.ready()
    _send(holder.out, {"event": "ready", "monotonic_ns": time.monotonic_ns()})
    _serve_until_end(holder, watchdog, endings)
    holder.end()
    _send(holder.out, holder.cleared or {})
    return 0 if holder.cleared is None or holder.cleared["ok"] else 1


def _serve_until_end(holder: Holder, watchdog: _Watchdog, endings: set[int]) -> None:
    """Serve requests and timed work until stdin ends, the lease expires, or a descriptor of `endings` is readable."""
    pending = b""
    while True:
        now_ns = time.monotonic_ns()
        watchdog.heartbeat(now_ns)
        readable, _, _ = select.select([0, *endings, *holder.files()], [], [], holder.wait_s(now_ns))
        if endings.intersection(readable):
            return
        if any(fd != 0 for fd in readable):
            holder.tick(time.monotonic_ns())
        if 0 in readable:
            chunk = os.read(0, 65536)
            if not chunk:
                return
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                _send(holder.out, _serve(holder, line))
        now_ns = time.monotonic_ns()
        if now_ns > holder.heard_ns + holder.ttl_ns:
            return
        holder.due(now_ns)


def _serve(holder: Holder, line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except ValueError as error:
        return {"event": "error", "error": f"not JSON: {error}", "where": line.decode("utf-8", "replace")[:80]}
    if not isinstance(request, dict):
        return {"event": "error", "error": "not a JSON object", "where": "request"}
    answer = holder.answer(request)
    return {**answer, "seq": request["seq"]} if "seq" in request else answer


def _send(out: int, message: dict[str, Any]) -> None:
    # If the controller is gone, the end of stdin will end the holder.
    with contextlib.suppress(OSError):
        os.write(out, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
