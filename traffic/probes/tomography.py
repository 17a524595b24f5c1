"""Locate the loss of probes from the probes that arrive: first the place that explains most, then the next. Pure.

Every probe travels one way on a known path (datagrams are not acknowledged). A place is a directed link or a node. If a
place loses a share of what crosses it, the likelihood of the observations is highest when that place is assumed to be
the cause:

    gain = log L(its probes | the share they lost) - log L(its probes | background)

Probes that cross a place and arrive are evidence against it, and lossy paths elsewhere are no evidence for it. If the
background is unknown, it is the loss elsewhere, and the gain compares two shares with one share for all:

    gain = log L(its probes | their share) + log L(the others | theirs) - log L(all | one share)

The best place is chosen, its probes are removed, and the search repeats while the gain exceeds what chance would give
(compare Duffield 2006, "Network tomography of binary network performance characteristics").
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Probes", "Suspect", "links_of", "locate"]

BACKGROUND = 0.002
"""Share of probes that a healthy fabric on a busy lab may lose."""

LEAST_GAIN = 12.0
"""Minimum gain in log-likelihood. Chance alone reaches it about once in 160,000 (exp -12)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """Probes sent and lost on one path: the nodes that they cross, with RNICs (`host1:rxe0`) at both ends."""

    path: tuple[str, ...]
    sent: int
    lost: int

    @property
    def places(self) -> frozenset[tuple[str, ...]]:
        """Directed links, and nodes; a host is a node of its own, whichever RNIC it uses."""
        nodes = {(node,) for node in self.path} | {(node.partition(":")[0],) for node in self.path}
        return frozenset(itertools.pairwise(self.path)) | nodes


class Place:
    """Where probes are lost or late: a link or a node, and the places that the same probes cross."""

    __slots__ = ()
    place: tuple[str, ...]
    alike: tuple[tuple[str, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names such as `rtsw1 -> ctsw1` or `host3`, followed by the names of `alike`."""
        return tuple(" -> ".join(place) for place in (self.place, *self.alike))


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect(Place):
    """A place that loses probes: a link (near end, far end, in the direction of the data) or a node.

    `sent` and `lost` count the probes across it. `alike` are places that the same probes cross, so that they cannot be
    distinguished. Between two racks, the uplink to a spine in one and the downlink in the other are alike.
    """

    place: tuple[str, ...]
    sent: int
    lost: int
    gain: float
    alike: tuple[tuple[str, ...], ...] = ()


def links_of(probes: Sequence[Probes]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return, by directed link, how many probes across it were sent and lost."""
    counts: dict[tuple[str, str], tuple[int, int]] = {}
    for group in probes:
        for link in itertools.pairwise(group.path):
            sent, lost = counts.get(link, (0, 0))
            counts[link] = sent + group.sent, lost + group.lost
    return counts


def locate(
    probes: Sequence[Probes],
    *,
    background: float | None = BACKGROUND,
    least_share: float = 0.0,
    least_gain: float = LEAST_GAIN,
) -> tuple[Suspect, ...]:
    """Return the places that lose probes, the strongest evidence first; empty if none loses more than the rest.

    `background` is the share lost on a healthy fabric (None: unknown, so it is the loss elsewhere). A place needs a
    loss of more than `least_share` and a gain of more than `least_gain`. A caller that searches n times should add
    log n to `least_gain`, because each search can exceed it by chance.
    """
    left = [group for group in probes if group.sent]
    suspects: list[Suspect] = []
    while best := _best(left, background, least_share, least_gain):
        suspects.append(best)
        left = [group for group in left if best.place not in group.places]
    return tuple(suspects)


def _best(probes: Sequence[Probes], background: float | None, least_share: float, least_gain: float) -> Suspect | None:
    crossing: dict[tuple[str, ...], list[int]] = {}
    for number, group in enumerate(probes):
        for place in group.places:
            crossing.setdefault(place, []).append(number)
    alike: dict[tuple[int, ...], list[tuple[str, ...]]] = {}
    for place, numbers in crossing.items():
        alike.setdefault(tuple(numbers), []).append(place)
    all_sent, all_lost = sum(group.sent for group in probes), sum(group.lost for group in probes)
    suspect = None
    for numbers_of_place, places in alike.items():
        crossing_groups = [probes[number] for number in numbers_of_place]
        sent, lost = sum(group.sent for group in crossing_groups), sum(group.lost for group in crossing_groups)
        if background is None:
            gain = _gain_over_others(sent, lost, all_sent - sent, all_lost - lost, least_share)
        else:
            gain = _gain(sent, lost, background, least_share)
        if gain > (suspect.gain if suspect else least_gain):
            # Links before nodes: they are more specific.
            place, *indistinguishable = sorted(places, key=lambda place: (-len(place), place))
            suspect = Suspect(place=place, sent=sent, lost=lost, gain=gain, alike=tuple(indistinguishable))
    return suspect


def _gain(sent: int, lost: int, background: float, least_share: float) -> float:
    share = lost / sent
    if share <= max(background, least_share):
        return 0.0
    return _log_likelihood(sent, lost, share) - _log_likelihood(sent, lost, background)


def _gain_over_others(sent: int, lost: int, others_sent: int, others_lost: int, least_share: float) -> float:
    """Return the gain with an unknown background. A place that all probes cross has none: there is no comparison."""
    if not others_sent or lost / sent <= max(others_lost / others_sent, least_share):
        return 0.0
    separate = _log_likelihood(sent, lost, lost / sent)
    separate += _log_likelihood(others_sent, others_lost, others_lost / others_sent)
    all_sent, all_lost = sent + others_sent, lost + others_lost
    return separate - _log_likelihood(all_sent, all_lost, all_lost / all_sent)


def _log_likelihood(sent: int, lost: int, share: float) -> float:
    arrived = sent - lost
    missing = lost * math.log(share) if lost else 0.0
    if not arrived:
        return missing
    return missing + (arrived * math.log1p(-share) if share < 1 else -math.inf)
