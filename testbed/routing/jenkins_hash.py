"""Bob Jenkins's lookup3 hash, as the Linux kernel computes it (`include/linux/jhash.h`)."""

from __future__ import annotations

__all__ = ["jhash", "nft_jhash"]

_MASK = 0xFFFFFFFF


def jhash(key: bytes, seed: int) -> int:
    """Return the 32-bit hash of `key` (`jhash(key, len(key), seed)` of the kernel)."""
    a = b = c = (0xDEADBEEF + len(key) + seed) & _MASK
    while len(key) > 12:  # noqa: PLR2004 - a round mixes three words
        a, b, c = _mix(*_add((a, b, c), key[:12]))
        key = key[12:]
    return _final(*_add((a, b, c), key)) if key else c


def nft_jhash(key: bytes, *, modulus: int, seed: int) -> int:
    """Return what the nftables expression `jhash KEY mod MODULUS seed SEED` gives, without its offset.

    The kernel scales the hash to 0 ... modulus - 1 by its high bits (`reciprocal_scale`), not by its remainder
    (`net/netfilter/nft_hash.c`).
    """
    return (jhash(key, seed) * modulus) >> 32


def _add(words: tuple[int, int, int], key: bytes) -> tuple[int, int, int]:
    padded = key.ljust(12, b"\0")
    first, second, third = (
        (word + int.from_bytes(padded[at : at + 4], "little")) & _MASK
        for word, at in zip(words, (0, 4, 8), strict=True)
    )
    return first, second, third


def _rotate(word: int, bits: int) -> int:
    return ((word << bits) | (word >> (32 - bits))) & _MASK


def _mix(a: int, b: int, c: int) -> tuple[int, int, int]:
    for bits in (4, 6, 8, 16, 19, 4):
        a = ((a - c) & _MASK) ^ _rotate(c, bits)
        c = (c + b) & _MASK
        a, b, c = b, c, a
    return a, b, c


def _final(a: int, b: int, c: int) -> int:
    for bits in (14, 11, 25, 16, 4, 14, 24):
        c = ((c ^ b) - _rotate(b, bits)) & _MASK
        a, b, c = b, c, a
    return b
