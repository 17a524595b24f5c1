"""Contents of the messages of a checked flow, and their verification. Pure.

Message n of a QP begins with n in 8 bytes. The rest is an excerpt of a tape of random bytes, whose start differs for
each n and each QP. Bytes left over from another message, another QP or another position therefore do not match.
"""

from __future__ import annotations

import hashlib

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Content", "Verifier", "count_differing", "nearest"]

PERIOD = 65537
"""Prime, so that a shift by any number of packets or slots is a different position on the tape."""
BY_MESSAGE = 40503
BY_CONN = 7919
NUMBER_BYTES = 8


def count_differing(data: bytes, expected: bytes) -> int:
    """Return how many bytes of a message differ from the expected ones. Both have the same length."""
    return sum(received != correct for received, correct in zip(data, expected, strict=True))


def _not_recounted(_expected: bytes) -> None:
    """Compare nothing: the message is in host memory."""


def nearest(remainder: int, expected: int, modulus: int) -> int:
    """Return the number nearest to `expected`, but not below 0, that has this remainder modulo `modulus`."""
    distance = (remainder - expected) % modulus
    return max(0, expected + (distance if distance < modulus // 2 else distance - modulus))


class Content:
    """Contents of messages of `size` bytes."""

    def __init__(self, size: int) -> None:
        tape = hashlib.shake_128(b"faultbed").digest(PERIOD)
        self.size = size
        self.tape = (tape * (1 + -(-size // PERIOD)))[: PERIOD + size]

    def of(self, conn: int, number: int) -> bytes:
        """Return message `number` of a connection."""
        start = (number * BY_MESSAGE + conn * BY_CONN) % PERIOD
        head = number.to_bytes(NUMBER_BYTES, "little")[: self.size]
        return head + self.tape[start : start + self.size - len(head)]


class Verifier:
    """Verifies the messages of one connection as they arrive.

    It counts bytes (`checked`), wrong bytes, and those of the bytes that were compared on a GPU, too (`recounted`).
    """

    def __init__(self, content: Content, conn: int) -> None:
        self.content = content
        self.conn = conn
        self.expected = 0
        self.is_rebuilt = False
        self.checked = self.wrong = self.recounted = 0

    def verify(self, data: bytes, recount: Callable[[bytes], int | None] = _not_recounted) -> None:
        """Verify the next message, of which the host reads `data`.

        `recount` compares the message with the expected one where it is, on a GPU, and returns the number of wrong
        bytes; None: it is in host memory. If both see a different number of wrong bytes, the larger one counts.
        """
        number = self._carried_number(data) if self.is_rebuilt else self.expected
        self.is_rebuilt = False
        expected = self.content.of(self.conn, number)
        if data != expected:
            number = self.expected
            expected = self.content.of(self.conn, number)
        wrong = 0 if data == expected else count_differing(data, expected)
        if (recounted := recount(expected)) is not None:
            wrong = max(wrong, recounted)
            self.recounted += len(data)
        self.wrong += wrong
        self.expected = number + 1
        self.checked += len(data)

    def _carried_number(self, data: bytes) -> int:
        """Return the message number that `data` carries; a short message carries only its lowest bytes."""
        width = min(NUMBER_BYTES, len(data))
        return nearest(int.from_bytes(data[:width], "little"), self.expected, 1 << 8 * width)
