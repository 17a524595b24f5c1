"""A change by commands of the target: a switch's command line, a vendor's tool, a file in sysfs.

The planner writes everything as data: programs and capabilities that are needed, values to store, commands that change,
revert and read back. Python (`re.MULTILINE`) and `grep -E` both evaluate the patterns, which use only their common
syntax.
"""

from __future__ import annotations

import shlex
import shutil
import time
from typing import Any

from faultbed.inject.node.actuator import Actuator, Refused
from faultbed.inject.node.command import heartbeat, match_lines, quote_output, require, run
from faultbed.inject.node.management import management_interfaces, on_device

__all__ = ["CommandsActuator"]

_LOOK_EVERY_S = 0.2
_SCRIPT_TRIES = "1 2 3"
"""Looks of the stored revert, a second apart, until the fault is gone."""
_LAST_LOOK_S = 10.0
"""Deadline of the readback before a removal, which waits for it. nvidia-smi needs seconds without persistence mode."""


class CommandsActuator(Actuator):
    """Changes the target by the commands `on` and `off`. The fault is on if the output of `look` matches `applied`.

    Args:
        on: commands (argv lists) that turn the fault on, in order.
        off: commands that revert them, any number of times. `{name}` in a word of any command stands for a value of
            `remember`, or for the program that `needs` selected.
        look: the readback command.
        applied: pattern of its output while the fault is on; may contain `{name}`.
        normal: pattern of its output before; any other output is a change that is not ours, and refused.
        needs: required programs. `mlxlink|mstlink` means the first of them that exists; commands call it `{mlxlink}`.
        able: (command, pattern, message if it does not match) of required capabilities; the message names alternatives.
        remember: by name, a command and a pattern whose first group is the value to restore.
        guard: an interface that must not carry the management connection.
        device: a PCIe device that must not carry the management connection either, by any of its interfaces.
        count: a command and a pattern whose first group is a number that rises with each hit; None: edges are the hits.
        settle_s: deadline for `look` to show a change.
        command_s: deadline of one command; a daemon of a switch takes longer than 30 s to restart.
        lost: pattern of the output of `look` that shows for certain that the fault, or a part of it, is no longer on,
            even if `applied` matches as well; Python alone evaluates it. None: there is no such output.
        gone: pattern of the output of `look` once the fault is gone, for a change that something else carries out after
            the commands, and for a tool that may print a message instead of its state; None: every output that does not
            match `applied` shows that it is gone.
        unclear: the reason, for the receipt, why an output that matches neither `applied` nor `lost` proves nothing.
            None: such an output shows that something else has ended the fault.
        shows: constants of the readback, which identify the target.
    """

    def __init__(
        self,
        *,
        on: list[list[str]],
        off: list[list[str]],
        look: list[str],
        applied: str,
        normal: str,
        needs: list[str],
        able: list[list[Any]],
        remember: dict[str, list[Any]],
        guard: str | None,
        count: list[Any] | None,
        settle_s: float,
        shows: dict[str, Any],
        device: str | None = None,
        command_s: float = 30.0,
        lost: str | None = None,
        gone: str | None = None,
        unclear: str | None = None,
    ) -> None:
        self._on, self._off, self._look = on, off, look
        self._applied, self._normal = applied, normal
        self._needs, self._able, self._remember = needs, able, remember
        self._device = device
        self._lost, self._gone, self._unclear = lost, gone, unclear
        self._guard, self._count, self._settle_s, self._shows = guard, count, settle_s, shows
        self._known: dict[str, str] = {}
        self._start_count = 0
        self._last_count = 0
        self.poll_s = 1.0 if count else None
        self._command_s = command_s
        self.patience_s = command_s + settle_s

    def prepare(self) -> dict[str, Any]:
        """Refuse a target that lacks a program or capability, carries management, or is in an unexpected state."""
        for need in self._needs:
            names = need.split("|")
            program = next((name for name in names if shutil.which(name)), None)
            if program is None:
                raise Refused(f"{' or '.join(names)} is not installed here; install it, or choose another target")
            self._known[names[0]] = program
        guarded = ({self._guard} if self._guard else set()) | (on_device(self._device) if self._device else set())
        if carries := sorted(guarded & management_interfaces() if guarded else ()):
            raise Refused(
                f"{', '.join(carries)} carries the management connection and is never a target; choose another"
            )
        for unfilled, pattern, missing in self._able:
            require(self._filled(unfilled), pattern, missing)
        for name, (unfilled, pattern) in self._remember.items():
            command = self._filled(unfilled)
            output = run(command)
            match = match_lines(pattern, output)
            if match is None:
                raise Refused(f"the value to restore cannot be read ({quote_output(command, output)})")
            self._known[name] = match[1]
        before = self.read()
        if before["applied"] or not match_lines(self._pattern(self._normal), self._output()):
            raise Refused(f"unexpected state, not set by faultbed: {before['said']!r}; restore it first")
        self._start_count = self._last_count = self._counted()
        return before

    def revert_script(self) -> str:
        """Return a script that runs all of `off` and fails if the readback still shows the fault."""
        lines = [f"{shlex.join(self._filled(command))} || failed=1" for command in self._off]
        look, grep = shlex.join(self._filled(self._look)), "grep -Eq --"
        is_on = f"{grep} {shlex.quote(self._pattern(self._applied))}"
        is_over = f"! {{ {look} | {is_on}; }}"
        if self._gone is not None:
            is_gone = f"{grep} {shlex.quote(self._pattern(self._gone))}"
            say = "printf '%s\\n' \"$said\""
            both = f"said=$({look}); {say} | {is_gone} && ! {{ {say} | {is_on}; }}"
            is_over = f"{{ for i in {_SCRIPT_TRIES}; do {both} && exit 0; sleep 1; done; false; }}"
        return "\n".join(["failed=", *lines, f'[ -z "$failed" ] && {is_over}'])

    def on(self) -> None:
        for command in self._on:
            self._run(command)
        self._settle(applied=True)

    def off(self) -> None:
        """Run all of `off`, even if a command fails."""
        failed = []
        for command in self._off:
            try:
                self._run(command)
            except OSError as error:
                failed.append(str(error))
        if failed:
            raise OSError("; ".join(failed))
        self._settle(applied=False)

    def read(self) -> dict[str, Any]:
        """Report whether the fault is on, and whether it is `gone` if there is a pattern for that."""
        output = self._output()
        gone = {} if self._gone is None else {"gone": match_lines(self._pattern(self._gone), output) is not None}
        return {
            "applied": match_lines(self._pattern(self._applied), output) is not None,
            **gone,
            **self._shows,
            "said": output.strip()[-200:],
        }

    def is_lost(self) -> bool:
        """Return whether `look` no longer shows the fault; what it prints may depend on the load (`unclear`)."""
        output = run(self._filled(self._look), timeout_s=_LAST_LOOK_S)
        if self._lost is not None and match_lines(self._pattern(self._lost), output):
            return True
        if match_lines(self._pattern(self._applied), output):
            return False
        if self._unclear is None:
            return True
        self.loss_unknown_why = self._unclear
        return False

    def hits(self) -> int | None:
        """Return the counter's increment; once the counter is removed with its rule, the last one that was read."""
        if self._count is None:
            return None
        self._last_count = max(self._last_count, self._counted())
        return self._last_count - self._start_count

    def _settle(self, *, applied: bool) -> None:
        deadline = time.monotonic() + self._settle_s
        while time.monotonic() < deadline:
            now = self.read()
            if now["applied"] == applied and (applied or now.get("gone", True)):
                return
            heartbeat()
            time.sleep(_LOOK_EVERY_S)

    def _pattern(self, pattern: str) -> str:
        return self._filled([pattern])[0]

    def _run(self, command: list[str]) -> None:
        run(self._filled(command), timeout_s=self._command_s)

    def _output(self) -> str:
        return run(self._filled(self._look))

    def _counted(self) -> int:
        if self._count is None:
            return 0
        command, pattern = self._count
        try:
            match = match_lines(pattern, run(self._filled(command)))
        except OSError:
            return 0
        return int(match[1]) if match else 0

    def _filled(self, command: list[str]) -> list[str]:
        words = []
        for word in command:
            for name, value in self._known.items():
                word = word.replace(f"{{{name}}}", value)  # noqa: PLW2901 - one word after the other
            words.append(word)
        return words
