"""Mutations of recorded files: bytes that changed, parts that are gone or there twice, and words that break readers."""

from samples import ALL

WORDS = (
    *(b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f"),
    *(
        b"NaN",
        b"-1",
        b"1e999",
        b"9" * 25,
        b"null",
        b"[" * 30,
        b'"',
        b"\\ud800",
        b"\n",
        b"\r",
        b"\x1b[31m",
        b"N/A",
        b"{}",
    ),
)


def mutations(every, usual):
    """Return how many mutations of a recorded file to try: `every` in `make nightly`, `usual` in `make unit`."""
    return every if ALL else usual


def mutated(content, rng):
    """Return a file with some bytes changed, a part removed, a part twice, or a strange word in it."""
    data = bytearray(content)
    for _ in range(int(rng.integers(1, 8))):
        at, size = int(rng.integers(len(data))), int(rng.integers(1, 64))
        kind = int(rng.integers(5))
        if kind == 0:
            data[at] = int(rng.integers(256))
        elif kind == 1:
            word = WORDS[int(rng.integers(len(WORDS)))]
            data[at : at + len(word)] = word
        elif kind == 2:
            del data[at : at + size]
        elif kind == 3:
            data[at:at] = data[at : at + size]
        else:
            data[at:at] = WORDS[int(rng.integers(len(WORDS)))]
        if not data:
            return bytes(content[:1])
    return bytes(data)
