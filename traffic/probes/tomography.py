"""Where probes are lost, from which of them arrive: the place that explains most, then the next one. Pure.

Every probe goes one way only (datagrams, nothing is acknowledged), on a path that is known. A place is a directed link,
or a node. If it loses a share of what crosses it, the likelihood of what was seen is highest when that place is it:

    gain = log L(its probes | the share they lost) - log L(its probes | background)

so that paths through it that arrive speak against it, and lossy paths elsewhere do not speak for it. Where nobody knows
the background, it is what is lost elsewhere, and the gain is that of two shares over one for all:

    gain = log L(its probes | their share) + log L(the others | theirs) - log L(all | one share)

The best place is taken, its probes are taken out, and so on while the gain is more than chance would give (compare
Duffield 2006, "Network tomography of binary network performance characteristics").
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Probes", "Suspect", "links_of", "locate"]

BACKGROUND = 0.002
"""Share of probes that a healthy fabric of a busy lab may lose."""

LEAST_GAIN = 12.0
"""Of log-likelihood: by chance alone such a gain comes about once in 160,000 (exp -12)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """Probes that went one way: the nodes that they cross, RNICs (`host1:rxe0`) at both ends; sent, and lost.

    Or that went there and back: then their path does, too.
    """

    path: tuple[str, ...]
    sent: int
    lost: int

    @property
    def places(self) -> frozenset[tuple[str, ...]]:
        """Directed links, then nodes; a host is a node of its own, whatever the RNIC."""
        nodes = {(node,) for node in self.path} | {(node.partition(":")[0],) for node in self.path}
        return frozenset(itertools.pairwise(self.path)) | nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A place that loses: a link (near end, far end; data goes that way) or a node; and what crossed it meanwhile.

    `alike` are places that the same probes cross: none of them can tell these apart. Between two racks, what goes up to
    a spine from the one comes down to the other.
    """

    place: tuple[str, ...]
    sent: int
    lost: int
    gain: float
    alike: tuple[tuple[str, ...], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """`rtsw1 -> ctsw1`, or `host3`; then those that are alike."""
        return tuple(" -> ".join(place) for place in (self.place, *self.alike))


def links_of(probes: Sequence[Probes]) -> dict[tuple[str, str], tuple[int, int]]:
    """By directed link: sent and lost of all probes that cross it."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for one in probes:
        for link in itertools.pairwise(one.path):
            sent, lost = found.get(link, (0, 0))
            found[link] = sent + one.sent, lost + one.lost
    return found


def locate(
    probes: Sequence[Probes],
    *,
    background: float | None = BACKGROUND,
    least_share: float = 0.0,
    least_gain: float = LEAST_GAIN,
) -> tuple[Suspect, ...]:
    """Places that lose, the most telling first; nothing: no more is lost than anywhere.

    `background` is the share that is lost anyhow (None: nobody knows, and it is what is lost elsewhere); a place of
    which no more than `least_share` is lost is not named, nor one that gains no more than `least_gain`: who looks n
    times asks for log n more.
    """
    left, found = [one for one in probes if one.sent], []
    while best := _best(left, background, least_share, least_gain):
        found.append(best)
        left = [one for one in left if best.place not in one.places]
    return tuple(found)


def _best(probes: Sequence[Probes], background: float | None, least_share: float, least_gain: float) -> Suspect | None:
    crossing: dict[tuple[str, ...], list[int]] = {}
    for number, one in enumerate(probes):
        for place in one.places:
            crossing.setdefault(place, []).append(number)
    alike: dict[tuple[int, ...], list[tuple[str, ...]]] = {}
    for place, numbers in crossing.items():
        alike.setdefault(tuple(numbers), []).append(place)
    all_sent, all_lost = sum(one.sent for one in probes), sum(one.lost for one in probes)
    found = None
    for those_numbers, places in alike.items():
        those = [probes[number] for number in those_numbers]
        sent, lost = sum(one.sent for one in those), sum(one.lost for one in those)
        if background is None:
            gain = _gain_over_others(sent, lost, all_sent - sent, all_lost - lost, least_share)
        else:
            gain = _gain(sent, lost, background, least_share)
        if gain > (found.gain if found else least_gain):
            # Links before nodes: they say more.
            place, *others = sorted(places, key=lambda place: (-len(place), place))
            found = Suspect(place=place, sent=sent, lost=lost, gain=gain, alike=tuple(others))
    return found


def _gain(sent: int, lost: int, background: float, least_share: float) -> float:
    share = lost / sent
    if share <= max(background, least_share):
        return 0.0
    return _likelihood(sent, lost, share) - _likelihood(sent, lost, background)


def _gain_over_others(sent: int, lost: int, others_sent: int, others_lost: int, least_share: float) -> float:
    """A place that all probes cross gains nothing: nobody knows how it would be without it."""
    if not others_sent or lost / sent <= max(others_lost / others_sent, least_share):
        return 0.0
    both = _likelihood(sent, lost, lost / sent) + _likelihood(others_sent, others_lost, others_lost / others_sent)
    return both - _likelihood(sent + others_sent, lost + others_lost, (lost + others_lost) / (sent + others_sent))


def _likelihood(sent: int, lost: int, share: float) -> float:
    arrived = sent - lost
    missing = lost * math.log(share) if lost else 0.0
    if not arrived:
        return missing
    return missing + (arrived * math.log1p(-share) if share < 1 else -math.inf)
