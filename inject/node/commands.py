"""A change that is made by commands of the target's own: a switch's command line, a vendor's tool, a file in sysfs.

Everything is data, written by the planner: what must be there, what must be so, what to remember, do, undo and look
at. Patterns are read by Python (`re.MULTILINE`) and by `grep -E`: they are kept to what both understand.
"""

from __future__ import annotations

import re
import shlex
import shutil
import time
from typing import Any

from inject.node.actuator import Refused
from inject.node.command import run, still_alive
from inject.node.management import management_interfaces, on_device

__all__ = ["CommandsActuator"]

_LOOK_EVERY_S = 0.2


class CommandsActuator:
    """Runs `on` and `off`; what `look` prints says by the pattern `applied` whether the fault is there.

    Args:
        on: commands (argv lists) that make the fault be, in order.
        off: commands that undo them, any number of times. `{name}` in a word of any command is what `remember` found,
            or the program that `needs` found under that name.
        look: the command that is read back.
        applied: pattern of its output while the fault is there; `{name}` in it, too.
        normal: pattern of its output before; anything else is somebody else's change, and refused.
        needs: programs that must be there; of `mlxlink|mstlink` the first that is there, as `{mlxlink}`.
        able: (command, pattern, what is missing otherwise, with where to aim instead) of capabilities.
        remember: by name, a command and a pattern whose first group is the value to come back to.
        guard: an interface that must not be one that carries management.
        device: a PCIe device none of whose interfaces may be such a one, whatever the inventory calls them.
        count: a command and a pattern whose first group is a number that rises with each hit; None: edges count.
        settle_s: how long a change may take until `look` shows it.
        command_s: how long one command may take; a daemon of a switch takes longer than 30 s to start again.
        shows: what the readback adds, to tell this target from others.
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
    ) -> None:
        self._on, self._off, self._look = on, off, look
        self._applied, self._normal = applied, normal
        self._needs, self._able, self._remember = needs, able, remember
        self._device = device
        self._guard, self._count, self._settle_s, self._shows = guard, count, settle_s, shows
        self._known: dict[str, str] = {}
        self._start_count = 0
        self._last_count = 0
        self.poll_s = 1.0 if count else None
        self._command_s = command_s
        self.patience_s = command_s + settle_s

    def prepare(self) -> dict[str, Any]:
        """Refuse what lacks a program or a capability, carries management, or is not as it must be before."""
        for need in self._needs:
            names = need.split("|")
            there = next((name for name in names if shutil.which(name)), None)
            if there is None:
                raise Refused(f"there is no {' and no '.join(names)} here: this target cannot do it")
            self._known[names[0]] = there
        guarded = ({self._guard} if self._guard else set()) | (on_device(self._device) if self._device else set())
        if carries := sorted(guarded & management_interfaces() if guarded else ()):
            raise Refused(f"{', '.join(carries)} carries the management connection: never a target")
        for unfilled, pattern, missing in self._able:
            command = self._filled(unfilled)
            try:
                said = run(command)
            except OSError as error:
                raise Refused(f"{missing} ({error})") from None
            if not _find(pattern, said):
                raise Refused(f"{missing} ({_answer(command, said)})")
        for name, (unfilled, pattern) in self._remember.items():
            command = self._filled(unfilled)
            said = run(command)
            found = _find(pattern, said)
            if found is None:
                raise Refused(f"what to come back to cannot be read ({_answer(command, said)})")
            self._known[name] = found[1]
        seen = self.read()
        if seen["applied"] or not _find(self._pattern(self._normal), self._said()):
            raise Refused(f"it is not as it must be before, and not by us: {seen['said']!r}")
        self._start_count = self._last_count = self._counted()
        return seen

    def revert_script(self) -> str:
        """All of `off`, then a look that must not show the fault any more."""
        lines = [f"{shlex.join(self._filled(command))} || failed=1" for command in self._off]
        look = f"{shlex.join(self._filled(self._look))} | grep -Eq -- {shlex.quote(self._pattern(self._applied))}"
        return "\n".join(["failed=", *lines, f'[ -z "$failed" ] && ! {{ {look}; }}'])

    def on(self) -> None:
        """The change, and the time that it takes."""
        for command in self._on:
            self._run(command)
        self._settle(applied=True)

    def off(self) -> None:
        """Back; every command is tried even if another one fails."""
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
        """What `look` prints now."""
        said = self._said()
        return {
            "applied": _find(self._pattern(self._applied), said) is not None,
            **self._shows,
            "said": said.strip()[-200:],
        }

    def hits(self) -> int | None:
        """How far the counter has come; the last value that could be read counts on when it has gone with its rule."""
        if self._count is None:
            return None
        self._last_count = max(self._last_count, self._counted())
        return self._last_count - self._start_count

    def close(self) -> None:
        """Nothing is held open."""

    def _settle(self, *, applied: bool) -> None:
        deadline = time.monotonic() + self._settle_s
        while self.read()["applied"] != applied and time.monotonic() < deadline:
            still_alive()
            time.sleep(_LOOK_EVERY_S)

    def _pattern(self, pattern: str) -> str:
        return self._filled([pattern])[0]

    def _run(self, command: list[str]) -> None:
        run(self._filled(command), timeout_s=self._command_s)

    def _said(self) -> str:
        return run(self._filled(self._look))

    def _counted(self) -> int:
        if self._count is None:
            return 0
        command, pattern = self._count
        try:
            found = _find(pattern, run(self._filled(command)))
        except OSError:
            return 0
        return int(found[1]) if found else 0

    def _filled(self, command: list[str]) -> list[str]:
        words = []
        for word in command:
            for name, value in self._known.items():
                word = word.replace(f"{{{name}}}", value)  # noqa: PLW2901 - one word after the other
            words.append(word)
        return words


def _answer(command: list[str], said: str) -> str:
    return f"`{shlex.join(command)}` says {' '.join(said.split())[-80:]!r}"


def _find(pattern: str, text: str) -> re.Match[str] | None:
    # Behind the last newline Python sees an empty line, which grep does not: `^(None)?$` would fit anything.
    return re.search(pattern, text.removesuffix("\n"), re.MULTILINE)
