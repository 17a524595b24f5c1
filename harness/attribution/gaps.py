"""Locate packet loss from the gaps that receivers saw and the NAKs that senders got. Pure.

Load on a machine adds timers and duplicates, but neither gaps nor NAKs, so a few of these are enough. A packet lost on
u→v is a gap at the receiver of one of the queue pairs whose data crosses u→v, and usually a NAK at its sender. If the
loss hits each of these queue pairs equally, the counts at these RNICs have the likelihood

    sum of log p(receiver) over the gaps + sum of log p(sender) over the NAKs

    p = (1 - STRAY) (share of the pairs that cross u→v) + STRAY (share of all RNICs)

The confidence in the best link is its share of the total likelihood of all links.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from faultbed.harness.attribution.signatures import Match, Signs, crosses
from faultbed.harness.record.evidence.run_evidence import RunEvidence
from faultbed.testbed.model.topology import Link

__all__ = ["match_gaps", "match_lost_in_switch"]

_LEAST = 2
"""Minimum number of gaps; a single one may come from a route change."""
_LEAST_SHARE = 0.5
_NEAR = 3.0
"""Links whose log-likelihoods differ by less cannot be distinguished."""
_STRAY = 0.02
"""Assumed share of gaps and NAKs that another place causes."""


def match_gaps(run: RunEvidence, signs: Signs, *, among: Iterable[Link], other: Match | None) -> Match | None:
    """Return the most likely link of the loss, or `other` if the gaps do not contradict it or are too few.

    `other` is the best match by all signs, timers and duplicates included. It is preferred if gaps and NAKs barely
    separate its link from the most likely one.
    """
    gaps, naks = (
        {end: round(count) for (sign, end), count in signs.counts.items() if sign == kind and count}
        for kind in ("gap", "nak")
    )
    if sum(gaps.values()) < _LEAST:
        return other
    ends = {end for sign, end in signs.counts if sign == "gap"}
    candidates: list[tuple[float, Link]] = []
    for link in among:
        for near, far in ((link.a.node, link.b.node), (link.b.node, link.a.node)):
            pairs = [
                (connection.src, connection.dst)
                for connection in run.workload.connections
                if crosses(connection, near, far, rnic=link.rnic)
            ]
            if pairs:
                score = _log_likelihood(gaps, [dst for _, dst in pairs], ends)
                score += _log_likelihood(naks, [src for src, _ in pairs], ends)
                candidates.append((score, link))
    if not candidates:
        return other
    best, link = max(candidates, key=lambda candidate: candidate[0])
    if other is not None and any(
        candidate_link == other.link and score > best - _NEAR for score, candidate_link in candidates
    ):
        return other
    share = sum(math.exp(score - best) for score, candidate_link in candidates if candidate_link == link)
    share /= sum(math.exp(score - best) for score, _ in candidates)
    if share < _LEAST_SHARE:
        return other
    words = (
        *(f"{end}: {count:,} gaps in the PSNs of what it received" for end, count in sorted(gaps.items())),
        *(f"{end}: {count:,} NAKs for a gap at the other end" for end, count in sorted(naks.items())),
        f"by the queue pairs that cross each link it is {100 * share:.0f} % likely this one",
    )
    return Match(link=link, host="", likeness=share, evidence=words)


def match_lost_in_switch(run: RunEvidence, signs: Signs, switch: str) -> tuple[Link, float] | None:
    """Return the outgoing link on which a switch most likely lost packets, and its probability; None without evidence.

    Call it only if packets are known to have been lost in this switch: one gap, NAK or dead queue pair is then enough.
    """
    gaps, naks = (
        {end: round(count) for (sign, end), count in signs.counts.items() if sign == kind and count}
        for kind in ("gap", "nak")
    )
    if not (gaps or naks or signs.dead):
        return None
    ends = {end for sign, end in signs.counts if sign == "gap"}
    connections = len(run.workload.connections)
    candidates: list[tuple[float, Link]] = []
    for link in run.lab.topology.links_of(switch):
        far = link.other(switch).node
        out = [
            (connection.src, connection.dst)
            for connection in run.workload.connections
            if crosses(connection, switch, far, rnic=link.rnic)
        ]
        back = [
            (connection.src, connection.dst)
            for connection in run.workload.connections
            if crosses(connection, far, switch, rnic=link.rnic)
        ]
        if not out:
            continue
        log_likelihood = _log_likelihood(gaps, [dst for _, dst in out], ends)
        log_likelihood += _log_likelihood(naks, [src for src, _ in out], ends)
        for pair in signs.dead:  # its data was lost, or the ACKs for data in the other direction
            hit = pair in out or pair in back
            log_likelihood += math.log((1 - _STRAY) * hit / len({*out, *back}) + _STRAY / connections)
        candidates.append((log_likelihood, link))
    if not candidates:
        return None
    best, link = max(candidates, key=lambda candidate: candidate[0])
    share = 1 / sum(math.exp(score - best) for score, _ in candidates)
    return (link, share) if share > _LEAST_SHARE else None


def _log_likelihood(counted: dict[str, int], ends: list[str], all_rnics: set[str]) -> float:
    """Return the log-likelihood of the counts at each RNIC, if events occur at `ends` or, rarely, at any RNIC."""
    share = Counter(ends)
    return sum(
        count * math.log((1 - _STRAY) * share[end] / len(ends) + _STRAY / max(1, len(all_rnics)))
        for end, count in counted.items()
    )
