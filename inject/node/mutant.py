"""An actuator that does not do its work: the harness must notice. For tests of the harness, never for a fault.

`noop` replaces the action by nothing and leaves the readback honest; `lie` also claims that all went well, so that
only an independent witness can tell.
"""

from __future__ import annotations

from typing import Any

from inject.node.actuator import Actuator, Refused

__all__ = ["Mutant"]


class Mutant:
    """Wraps a real actuator; everything but `on` and `off` (and, for `lie`, what is said of them) is the real thing."""

    def __init__(self, real: Actuator, how: str) -> None:
        if how not in ("noop", "lie"):
            raise Refused(f"unknown mutation {how!r}")
        self._real, self._lies = real, how == "lie"
        self._claimed = False
        self.poll_s = real.poll_s

    def prepare(self) -> dict[str, Any]:
        """As the real one."""
        return self._real.prepare()

    def revert_script(self) -> str:
        """As the real one."""
        return self._real.revert_script()

    def on(self) -> None:
        """Nothing."""
        self._claimed = self._lies

    def off(self) -> None:
        """Nothing."""
        self._claimed = False

    def read(self) -> dict[str, Any]:
        """The truth, or the claim."""
        return {**self._real.read(), **({"applied": True} if self._claimed else {})}

    def hits(self) -> int | None:
        """The truth, or one hit."""
        hits = self._real.hits()
        return max(hits, int(self._claimed)) if hits is not None and self._lies else hits

    def close(self) -> None:
        """As the real one."""
        self._real.close()
