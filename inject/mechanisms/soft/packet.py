"""Faults of single packets: drop, mark and corrupt in the hop; delay, duplicate and reorder on its detour; forge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from faultbed.inject.mechanisms.mechanism import Mechanism, Request, Step, Witness, holder_request, rnic_counters
from faultbed.inject.mechanisms.soft.hop import (
    ACTS,
    LOSS_COUNTERS,
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
from faultbed.inject.selection import by_netem, netem_seed
from faultbed.testbed.errors import UsageError

__all__ = ["BY_KIND"]

# Counters that a forged packet moves at the RNIC that accepts it.
_FORGED = {"nak": ("completer_retry_err", "rcvd_seq_err"), "replay": ("duplicate_request",)}
# More packets than all queue pairs of a host have in flight: the detour itself drops nothing (tc-netem(8), limit).
_LIMIT = "limit 20000"


def _in_hop(request: Request, act: str, witness: Witness) -> Mechanism:
    match, late_binding = matches(request)
    hop = hop_of(request)
    rules = ruleset(request, hop, match, ACTS[act])
    return Mechanism(
        place=hop.place,
        request=hop_request(request, hop, rules),
        steps=hop_steps(request, hop, rules),
        must_move=(witness,),
        must_not_move=rnic_counters(request.topology, "send_err"),
        shows={"device": hop.port.netdev, "hook": hop.hook},
        late_binding=late_binding,
        complete_after=one_packet(request),
        selection=selection_of(request),
    )


def _on_detour(
    request: Request, queue: str, witness: Witness, *, count: str = "hits", drain_ms: float = 0.0, draws: bool = False
) -> Mechanism:
    """Return the mechanism of a fault on a detour; `draws`: its queue draws at random for each packet."""
    match, late_binding = matches(request)
    selection, shows = selection_of(request), dict[str, Any](queue=queue.partition(" ")[0])
    if draws:
        selection = selection or by_netem(request.spec.seed)
        seed = netem_seed(request.spec.seed)
        queue, shows = f"{queue} seed {seed}", {**shows, "queue_seed": seed}
    hop = hop_of(request)
    rules = ruleset(request, hop, match, detour_act(request, hop))
    return Mechanism(
        place=hop.place,
        request=detour_request(request, hop, rules, queue=queue, count=count, drain_ms=drain_ms),
        steps=detour_steps(request, hop, rules, queue=queue),
        must_move=(witness,),
        must_not_move=rnic_counters(request.topology, "send_err"),
        shows={"device": hop.port.netdev, "hook": hop.hook, **shows},
        late_binding=late_binding,
        complete_after=one_packet(request),
        selection=selection,
    )


def _lost(request: Request) -> Witness:
    return Witness(any_of=counters_of_ends(request, *LOSS_COUNTERS))


def _marked(request: Request, hop: Hop, counter: str) -> Witness:
    """Return the witness that counts marked packets in the IP layer behind the hop (net/ipv4/ip_input.c)."""
    if hop.far is not None:
        return Witness(any_of=(f"{hop.far}/ip.{counter}",))
    # Packets from the port pass its own switch first, then the hosts.
    nodes = [hop.port.node, *(host.name for host in request.topology.hosts)]
    return Witness(any_of=tuple(f"{node}/ip.{counter}" for node in nodes))


def _drop(request: Request) -> Mechanism:
    params = request.spec.params
    selected_by = [name for name in ("share", "every", "psn") if params.get(name) is not None]
    if len(selected_by) != 1:
        raise UsageError(
            f"{request.where}: packet.drop needs one of share, every and psn; it has {selected_by or 'none'}"
        )
    if params.get("burst") is None:
        for name in ("loss_bad", "loss_good"):
            if params.get(name) is not None:
                raise UsageError(f"{request.where}.{name}: only a channel with bursts has two states; add burst")
        return _in_hop(request, "drop", _lost(request))
    queue = f"netem {_LIMIT} loss gemodel {' '.join(f'{100 * chance:.6f}%' for chance in _gilbert_elliott(request))}"
    without = request.with_params({k: v for k, v in params.items() if k != "share"})
    return _on_detour(without, queue, _lost(request), count="drops", draws=True)


def _gilbert_elliott(request: Request) -> tuple[float, float, float, float]:
    """Return p (good to bad), r (bad to good), and the loss in the bad and the good state, ordered as in tc-netem(8).

    They follow from the mean share lost and the mean length 1/r of the bad state: a share p/(p+r) of packets meets the
    bad state (Elliott 1963; the kernel's own chain: net/sched/sch_netem.c, loss_gilb_ell).
    """
    params, where = request.spec.params, request.where
    share, burst = params.get("share"), params["burst"]
    if share is None or not 0 < share < 1:
        raise UsageError(f"{where}.burst: bursts need a mean share of lost packets; add share, below 1")
    bad, good = params.get("loss_bad", 1.0), params.get("loss_good", 0.0)
    if not good < share < bad:
        raise UsageError(
            f"{where}.share: {share:g} is not between the loss in the good state ({good:g}) and in the bad state "
            f"({bad:g}); choose a share between them"
        )
    to_good = 1 / burst
    to_bad = to_good * (share - good) / (bad - share)
    if to_bad > 1:
        raise UsageError(
            f"{where}.burst: a share of {share:g} is impossible with bursts of {burst:g} packets; lengthen the burst"
        )
    return to_bad, to_good, bad, good


def _mark(request: Request) -> Mechanism:
    return _in_hop(request, "mark", _marked(request, hop_of(request), "InCEPkts"))


def _corrupt(request: Request) -> Mechanism:
    if request.spec.params.get("share") == 1:
        raise UsageError(f"{request.where}.share: if every packet is corrupt, go-back-N never ends; set less than 1")
    if all(request.spec.params.get(name) is None for name in ("share", "every", "psn")):
        raise UsageError(f"{request.where}: packet.corrupt needs share, every or psn; add one of them")
    return _in_hop(request, "corrupt", _lost(request))


def _delay(request: Request) -> Mechanism:
    delay_ms, jitter_ms = request.spec.params["delay"], request.spec.params.get("jitter", 0.0)
    if jitter_ms > delay_ms:
        raise UsageError(f"{request.where}.jitter: {jitter_ms:g} ms exceeds the delay of {delay_ms:g} ms; reduce it")
    jitter = f" {jitter_ms:g}ms" if jitter_ms else ""
    queue = f"netem {_LIMIT} delay {delay_ms:g}ms{jitter}"
    witness = _marked(request, hop_of(request), "InECT1Pkts")
    return _on_detour(request, queue, witness, drain_ms=delay_ms + jitter_ms, draws=bool(jitter_ms))


def _reorder(request: Request) -> Mechanism:
    selected_by = [name for name in ("share", "every", "psn") if request.spec.params.get(name) is not None]
    if not selected_by or request.spec.params.get("share") == 1:
        raise UsageError(
            f"{request.where}: packet.reorder must leave some packets in place; add share (below 1), every or psn"
        )
    late_ms = request.spec.params["late"]
    witness = Witness(any_of=counters_of_ends(request, "out_of_seq_request", "rcvd_seq_err", "duplicate_request"))
    return _on_detour(request, f"netem {_LIMIT} delay {late_ms:g}ms", witness, drain_ms=late_ms)


def _duplicate(request: Request) -> Mechanism:
    # Each marked packet arrives twice, so the receiver counts more than were sent on the detour.
    return _on_detour(request, f"netem {_LIMIT} duplicate 100%", _marked(request, hop_of(request), "InECT1Pkts"))


def _forge(request: Request) -> Mechanism:
    kind, qp, count = (request.spec.params[name] for name in ("what", "qp", "count"))
    if isinstance(qp, str) and qp != "any":
        raise UsageError(f"{request.where}.qp: a forged packet is made from one to a QP number, or to any; not {qp}")
    hop = hop_of(request)
    link = request.target.link
    if link is None or link.rnic is None or hop.far != link.b.node:
        raise UsageError(f"{request.where}.target: a forged packet goes to an RNIC; name one, or its port")
    args = {
        "netns": hop.place.netns,
        "device": hop.port.netdev,
        "what": kind,
        "qp": None if qp == "any" else qp,
        "count": count,
    }
    rnic = f"{link.b.node}/{link.rnic}"
    effects = tuple(f"{rnic}.{name}" for name in _FORGED.get(kind, ()))
    to = "a QP" if qp == "any" else f"QP {qp}"
    return Mechanism(
        place=hop.place,
        request=holder_request(request, "forge", args, claims=f"{hop.place.name}/forge/{request.id}"),
        steps=(
            Step(
                do=f"{count} times: send a {kind} out of {hop.port.netdev} of {hop.place.name}, made from a packet "
                f"to {to} that is passing (AF_PACKET)",
                undo="# nothing: a packet that was sent cannot be recalled",
            ),
        ),
        must_move=(_marked(request, hop, "InECT1Pkts"), *((Witness(any_of=effects),) if effects else ())),
        must_not_move=rnic_counters(request.topology, "send_err"),
        shows={"device": hop.port.netdev, "what": kind},
        complete_after=count,
    )


BY_KIND: Mapping[str, Callable[[Request], Mechanism]] = {
    "packet.drop": _drop,
    "packet.mark": _mark,
    "packet.corrupt": _corrupt,
    "packet.delay": _delay,
    "packet.reorder": _reorder,
    "packet.duplicate": _duplicate,
    "packet.forge": _forge,
}
