"""Record of the times at which a switch differed from its installed scheme; times are ns of its machine."""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

__all__ = ["BGP", "FOREIGN", "SETTING", "UNWATCHED", "Deviation", "DeviationLog"]

FOREIGN, BGP, SETTING, UNWATCHED = "foreign", "bgp", "setting", "unwatched"
"""Causes: another program changed the scheme's objects, BGP lost a next hop, a setting of ECMP was changed, or changes
could not be watched."""
_MOST = 1000
"""Deviations that are kept: a switch whose BGP sessions flap for hours has more."""


class Deviation:
    """One difference between a switch and its scheme; `port` and `prefix` say where BGP lost a next hop."""

    def __init__(self, cause: str, what: str, port: str = "", prefix: str = "") -> None:
        self.cause, self.what, self.port, self.prefix = cause, what, port, prefix

    def to_json(self, begin_ns: int, end_ns: int | None) -> dict[str, Any]:
        """Return plain data; `end_ns` None: it had not ended when the scheme was removed."""
        return {
            "begin_ns": begin_ns,
            "end_ns": end_ns,
            "cause": self.cause,
            "what": self.what,
            "port": self.port,
            "prefix": self.prefix,
        }


class DeviationLog:
    """Deviations of one switch, each from its first to its last notification of the kernel."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[int, Deviation]] = {}
        self._over: list[dict[str, Any]] = []
        self._full_ns: int | None = None

    def update(self, first_ns: int, last_ns: int, present: Mapping[str, Deviation]) -> None:
        """Record all present deviations by subject.

        A new deviation began with the first change since the last update. A deviation that is gone ended with the last
        change.
        """
        for subject in [subject for subject in self._open if subject not in present]:
            begin_ns, deviation = self._open.pop(subject)
            self._append(deviation, begin_ns, last_ns)
        self.begin(first_ns, present)

    def begin(self, first_ns: int, present: Mapping[str, Deviation]) -> None:
        """Record deviations that are present. The others stay open, because it is unknown whether they have ended."""
        for subject, deviation in present.items():
            self._open.setdefault(subject, (first_ns, deviation))

    def not_watched(self, begin_ns: int, end_ns: int, reason: str) -> None:
        """Record a time in which changes may have been missed."""
        self._append(Deviation(UNWATCHED, reason), begin_ns, end_ns)

    @property
    def has_open(self) -> bool:
        """Whether a deviation has not ended."""
        return bool(self._open)

    def report(self) -> list[dict[str, Any]]:
        """Return all deviations as plain data, in order of their begin."""
        entries = [*self._over, *(deviation.to_json(begin_ns, None) for begin_ns, deviation in self._open.values())]
        if self._full_ns is not None:
            full = Deviation(UNWATCHED, f"more than {_MOST} deviations; the later ones are not recorded")
            entries.append(full.to_json(self._full_ns, None))
        return sorted(entries, key=lambda entry: entry["begin_ns"])

    def _append(self, deviation: Deviation, begin_ns: int, end_ns: int) -> None:
        if len(self._over) < _MOST:
            self._over.append(deviation.to_json(begin_ns, end_ns))
        elif self._full_ns is None:
            self._full_ns = begin_ns
