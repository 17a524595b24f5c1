"""An actuator that changes nothing, for tests of the harness: a run with it must never count as proven.

`noop` reports the real state. `lie` reports success, so that only an independent witness can reveal it.
"""

from __future__ import annotations

from typing import Any

from faultbed.inject.node.actuator import Actuator, Refused

__all__ = ["Mutant"]


class Mutant(Actuator):
    """Wraps a real actuator: `on` and `off` do nothing, and `lie` reports that they did."""

    def __init__(self, real: Actuator, how: str) -> None:
        if how not in ("noop", "lie"):
            raise Refused(f"unknown mutation {how!r}")
        self._real, self._lies = real, how == "lie"
        self._claimed = False
        self.poll_s = real.poll_s

    def prepare(self) -> dict[str, Any]:
        return self._real.prepare()

    def revert_script(self) -> str:
        return self._real.revert_script()

    def on(self) -> None:
        self._claimed = self._lies

    def update(self, **_args: Any) -> None:
        pass

    def off(self) -> None:
        self._claimed = False

    def read(self) -> dict[str, Any]:
        return {**self._real.read(), **({"applied": True} if self._claimed else {})}

    def hits(self) -> int | None:
        """Return the real hits, or at least one for `lie`."""
        hits = self._real.hits()
        return max(hits, int(self._claimed)) if hits is not None and self._lies else hits

    def close(self) -> None:
        self._real.close()
