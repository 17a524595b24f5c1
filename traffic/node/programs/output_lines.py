"""Lines of a program's output: split, with a limit of their length, and with a limit of how many bytes are kept."""

from __future__ import annotations

__all__ = ["MOST_KEPT", "MOST_LINE", "Limit", "Lines"]

MOST_LINE = 64 << 10
"""Longest line; the rest of a longer one is another line."""
MOST_KEPT = 1 << 20
"""Bytes of a program's output that are sent to the controller. Readers of progress see all of it."""


class Lines:
    r"""Splits output into lines. `\r` ends a line, too: programs overwrite their progress with it."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: bytes) -> list[str]:
        """Return the lines that are complete now, without their ends."""
        *lines, self._rest = (self._rest + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        while len(self._rest) > MOST_LINE:
            lines.append(self._rest[:MOST_LINE])
            self._rest = self._rest[MOST_LINE:]
        return [line.decode("utf-8", "replace") for line in lines]

    def end(self) -> list[str]:
        """Return the last line, if it has no end."""
        rest, self._rest = self._rest, b""
        return [rest.decode("utf-8", "replace")] if rest else []


class Limit:
    """Counts output. `cut_bytes` are those beyond the limit."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._left = most
        self.cut_bytes = 0

    def keep(self, lines: list[str]) -> list[str]:
        """Return the lines that are kept. The first one that does not fit, and all after it, are cut."""
        kept = []
        for line in lines:
            size = len(line.encode()) + 1
            if self.cut_bytes or size > self._left:
                self.cut_bytes += size
            else:
                self._left -= size
                kept.append(line)
        return kept
