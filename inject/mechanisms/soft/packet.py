"""Faults of single packets: dropped, marked, corrupted in the hop; delayed, duplicated, reordered on its detour."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from inject.mechanisms.mechanism import Request, Shot, Step, Witness, held, rnic_counters
from inject.mechanisms.soft.hop import (
    ACTS,
    Hop,
    counters_of_ends,
    detour_act,
    detour_request,
    detour_steps,
    hop_of,
    hop_request,
    hop_steps,
    matches,
    one_packet,
    ruleset,
    selection_of,
)
from inject.selection import by_netem, netem_seed
from testbed.errors import UsageError

__all__ = ["BY_KIND"]

# A packet is missing: the receiver sees the gap (NAK), or the sender's timer runs out; a lost ACK makes a duplicate.
_LOSS = ("out_of_seq_request", "rcvd_seq_err", "completer_retry_err", "duplicate_request")
# What a forged packet does to the RNIC that believes it.
_FORGED = {"nak": ("completer_retry_err", "rcvd_seq_err"), "replay": ("duplicate_request",)}
# More packets than all queue pairs of a host have in flight: the detour drops nothing unasked (tc-netem(8), limit).
_LIMIT = "limit 20000"


def _in_hop(asked: Request, act: str, witness: Witness) -> Shot:
    match, learn = matches(asked)
    hop = hop_of(asked)
    rules = ruleset(asked, hop, match, ACTS[act])
    return Shot(
        place=hop.place,
        request=hop_request(asked, hop, rules),
        steps=hop_steps(asked, hop, rules),
        must_move=(witness,),
        must_not_move=rnic_counters(asked.topology, "send_err"),
        shows={"device": hop.port.netdev, "hook": hop.hook},
        learn=learn,
        complete_after=one_packet(asked),
        selection=selection_of(asked),
    )


def _on_detour(
    asked: Request, queue: str, witness: Witness, *, count: str = "hits", drain_ms: float = 0.0, draws: bool = False
) -> Shot:
    """Plan a fault on a detour; `draws` says that its queue draws at random for each packet."""
    match, learn = matches(asked)
    selection, shows = selection_of(asked), dict[str, Any](queue=queue.partition(" ")[0])
    if draws:
        selection = selection or by_netem(asked.seed)
        seed = netem_seed(asked.seed)
        queue, shows = f"{queue} seed {seed}", {**shows, "queue_seed": seed}
    hop = hop_of(asked)
    rules = ruleset(asked, hop, match, detour_act(asked, hop))
    return Shot(
        place=hop.place,
        request=detour_request(asked, hop, rules, queue=queue, count=count, drain_ms=drain_ms),
        steps=detour_steps(asked, hop, rules, queue=queue),
        must_move=(witness,),
        must_not_move=rnic_counters(asked.topology, "send_err"),
        shows={"device": hop.port.netdev, "hook": hop.hook, **shows},
        learn=learn,
        complete_after=one_packet(asked),
        selection=selection,
    )


def _lost(asked: Request) -> Witness:
    return Witness(any_of=counters_of_ends(asked, *_LOSS))


def _seen(asked: Request, hop: Hop, counter: str) -> Witness:
    """Marked packets as the IP layer behind the hop counts them (net/ipv4/ip_input.c, ip_rcv_core)."""
    if hop.far is not None:
        return Witness(any_of=(f"{hop.far}/ip.{counter}",))
    # Coming from the port: its own switch takes them in, then hosts.
    nodes = [hop.port.node, *(host.name for host in asked.topology.hosts)]
    return Witness(any_of=tuple(f"{node}/ip.{counter}" for node in nodes))


def _drop(asked: Request) -> Shot:
    params = asked.params
    given = [name for name in ("share", "every", "psn") if params.get(name) is not None]
    if len(given) != 1:
        raise UsageError(f"{asked.where}: packet.drop takes either share or psn (or every); it got {given or 'none'}")
    if params.get("burst") is None:
        for name in ("loss_bad", "loss_good"):
            if params.get(name) is not None:
                raise UsageError(f"{asked.where}.{name}: without bursts there are no two states; add burst")
        return _in_hop(asked, "drop", _lost(asked))
    queue = f"netem {_LIMIT} loss gemodel {' '.join(f'{100 * chance:.6f}%' for chance in _gilbert_elliott(asked))}"
    without = dataclasses.replace(asked, params={k: v for k, v in params.items() if k != "share"})
    return _on_detour(without, queue, _lost(asked), count="drops", draws=True)


def _gilbert_elliott(asked: Request) -> tuple[float, float, float, float]:
    """Chances of a channel: good to bad (p), bad to good (r), loss in bad and in good; the order of tc-netem(8).

    From the mean share lost and the mean length 1/r of the bad state: a share p/(p+r) of packets meets that state
    (Elliott 1963; the kernel's own chain: net/sched/sch_netem.c, loss_gilb_ell).
    """
    params, where = asked.params, asked.where
    share, burst = params.get("share"), params["burst"]
    if share is None or not 0 < share < 1:
        raise UsageError(f"{where}.burst: bursts have a mean share of packets; add share, below 1")
    bad, good = params.get("loss_bad", 1.0), params.get("loss_good", 0.0)
    if not good < share < bad:
        raise UsageError(
            f"{where}.share: a mean of {share:g} is not between the loss in the good state ({good:g}) and in the bad "
            f"one ({bad:g})"
        )
    back = 1 / burst
    into = back * (share - good) / (bad - share)
    if into > 1:
        raise UsageError(f"{where}.burst: a share of {share:g} cannot come in bursts of only {burst:g} packets")
    return into, back, bad, good


def _mark(asked: Request) -> Shot:
    return _in_hop(asked, "mark", _seen(asked, hop_of(asked), "InCEPkts"))


def _corrupt(asked: Request) -> Shot:
    if asked.params.get("share") == 1:
        raise UsageError(f"{asked.where}.share: with every packet broken go-back-N never ends; take less than 1")
    if all(asked.params.get(name) is None for name in ("share", "every", "psn")):
        raise UsageError(f"{asked.where}: packet.corrupt takes share, every or psn")
    return _in_hop(asked, "corrupt", _lost(asked))


def _delay(asked: Request) -> Shot:
    delay_ms, jitter_ms = asked.params["delay"], asked.params.get("jitter", 0.0)
    if jitter_ms > delay_ms:
        raise UsageError(f"{asked.where}.jitter: {jitter_ms:g} ms is more than the delay of {delay_ms:g} ms")
    jitter = f" {jitter_ms:g}ms" if jitter_ms else ""
    queue = f"netem {_LIMIT} delay {delay_ms:g}ms{jitter}"
    witness = _seen(asked, hop_of(asked), "InECT1Pkts")
    return _on_detour(asked, queue, witness, drain_ms=delay_ms + jitter_ms, draws=bool(jitter_ms))


def _reorder(asked: Request) -> Shot:
    given = [name for name in ("share", "every", "psn") if asked.params.get(name) is not None]
    if not given or asked.params.get("share") == 1:
        raise UsageError(
            f"{asked.where}: packet.reorder lets some packets be overtaken; add share (below 1), every or psn"
        )
    late_ms = asked.params["late"]
    witness = Witness(any_of=counters_of_ends(asked, "out_of_seq_request", "rcvd_seq_err", "duplicate_request"))
    return _on_detour(asked, f"netem {_LIMIT} delay {late_ms:g}ms", witness, drain_ms=late_ms)


def _duplicate(asked: Request) -> Shot:
    # Each dyed packet comes twice, so the receiver has counted more than were sent on the detour.
    return _on_detour(asked, f"netem {_LIMIT} duplicate 100%", _seen(asked, hop_of(asked), "InECT1Pkts"))


def _forge(asked: Request) -> Shot:
    what, qp, count = (asked.params[name] for name in ("what", "qp", "count"))
    hop = hop_of(asked)
    link = asked.target.link
    if link is None or link.rnic is None or hop.far != link.b.node:
        raise UsageError(f"{asked.where}.target: a forged packet goes to an RNIC; take one, or the port that faces it")
    args = {
        "netns": hop.place.netns,
        "device": hop.port.netdev,
        "what": what,
        "qp": None if qp == "any" else qp,
        "count": count,
    }
    rnic = f"{link.b.node}/{link.rnic}"
    effects = tuple(f"{rnic}.{name}" for name in _FORGED.get(what, ()))
    to = "a QP" if qp == "any" else f"QP {qp}"
    return Shot(
        place=hop.place,
        request=held(asked, "forge", args, claims=f"{hop.place.name}/forge/{asked.id}"),
        steps=(
            Step(
                do=f"{count} times: send a {what} out of {hop.port.netdev} of {hop.place.name}, made from a packet "
                f"to {to} that is passing (AF_PACKET)",
                undo="# a packet that was sent is gone",
            ),
        ),
        must_move=(_seen(asked, hop, "InECT1Pkts"), *((Witness(any_of=effects),) if effects else ())),
        must_not_move=rnic_counters(asked.topology, "send_err"),
        shows={"device": hop.port.netdev, "what": what},
        complete_after=count,
    )


BY_KIND: Mapping[str, Callable[[Request], Shot]] = {
    "packet.drop": _drop,
    "packet.mark": _mark,
    "packet.corrupt": _corrupt,
    "packet.delay": _delay,
    "packet.reorder": _reorder,
    "packet.duplicate": _duplicate,
    "packet.forge": _forge,
}
