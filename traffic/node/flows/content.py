"""What is in the messages of a flow that is checked, and the look at them. Pure.

Message n of a QP begins with n in 8 bytes, and goes on with a part of a tape of random bytes that begins at another
place for each n and each QP. What is left over from another message, of another QP, or at another place, does not fit.
"""

from __future__ import annotations

import hashlib

__all__ = ["Content", "Looker", "differing", "nearest"]

PERIOD = 65537
"""Prime: a shift by a multiple of packets or slots is always another place of the tape."""
BY_MESSAGE = 40503
BY_CONN = 7919
NUMBER_BYTES = 8


def differing(data: bytes, want: bytes) -> int:
    """How many bytes of a message are others than they should be; both are of one size."""
    return sum(one != other for one, other in zip(data, want, strict=True))


def nearest(said: int, due: int, whole: int) -> int:
    """The number nearest to `due`, but not below 0, of which only `said`, its remainder modulo `whole`, is known."""
    away = (said - due) % whole
    return max(0, due + (away if away < whole // 2 else away - whole))


class Content:
    """What is in messages of `size` bytes."""

    def __init__(self, size: int) -> None:
        tape = hashlib.shake_128(b"faultbed").digest(PERIOD)
        self.size = size
        self.tape = (tape * (1 + -(-size // PERIOD)))[: PERIOD + size]

    def of(self, conn: int, number: int) -> bytes:
        """Message `number` of a connection."""
        start = (number * BY_MESSAGE + conn * BY_CONN) % PERIOD
        head = number.to_bytes(NUMBER_BYTES, "little")[: self.size]
        return head + self.tape[start : start + self.size - len(head)]


class Looker:
    """Looks at the messages of one connection as they come; counts bytes, and wrong ones."""

    def __init__(self, content: Content, conn: int) -> None:
        self.content = content
        self.conn = conn
        self.due = 0
        self.rejoined = False
        self.checked = self.wrong = 0

    def look(self, data: bytes) -> None:
        """The next message."""
        number = self._near(data) if self.rejoined else self.due
        self.rejoined = False
        want = self.content.of(self.conn, number)
        if data != want:
            number = self.due
            want = self.content.of(self.conn, number)
            self.wrong += differing(data, want)
        self.due = number + 1
        self.checked += len(data)

    def _near(self, data: bytes) -> int:
        """The number that a message says it has, which in a short one is but its last bytes."""
        width = min(NUMBER_BYTES, len(data))
        return nearest(int.from_bytes(data[:width], "little"), self.due, 1 << 8 * width)
