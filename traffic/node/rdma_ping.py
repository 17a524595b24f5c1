"""RDMA ping between every RNIC of this host and every RNIC of the other hosts, on all hosts at once.

    python3 -m faultbed.traffic.node.rdma_ping < request.json

Each pair of RNICs gets a reliable connection. Each end sends 64 bytes that are unique to this run and direction. Both
ends must see their own send acknowledged and the peer's bytes arrive. The hosts exchange QP numbers by UDP datagrams
over the front end: each host repeats its state to its peers until all are done or the deadline passes.

The request: {"run": str, "host": str, "address": front-end address, "rnics": [{"name", "address"}], "peers": [{"name",
"address", "rnics": [...]}], "deadline_s": float}, addresses without prefix length. All hosts get the same `run`, so
that datagrams of another run are ignored. The answer: {"pairs": count, "failed": ["host1:rxe0 > host2:rxe1, host1:rxe1
> host2:rxe1: reason"], "slowest_us": float}. Each pair of RNICs is counted at both of its ends.

It deliberately shares no code with the traffic engine: a defect in the engine must not be able to hide itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import socket
import sys
import time
from collections.abc import Iterable
from typing import Any

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

from faultbed.testbed.node.kernel_files import gid_of

__all__ = ["PORT", "ping"]

PORT = 7471
SIZE = 64
REPEAT_S = 0.25
POLL_S = 0.01
# Phases of a host: its QP numbers are known, its QPs are connected, all its completions have arrived.
KNOWN, CONNECTED, DONE = 0, 1, 2
TIMEOUT = 14  # 4.096 us * 2^14 = 67 ms until a lost packet is retransmitted
FOR_EVER = 7  # retries: rxe retries forever, so that the deadline of the ping decides
MIN_RNR_TIMER = 12


def ping(request: dict[str, Any]) -> dict[str, Any]:
    """Ping as requested and return the answer (see the module's docstring)."""
    run = _Run(request)
    try:
        run.make()
        run.talk(KNOWN, until=KNOWN)
        run.connect()
        run.talk(CONNECTED, until=CONNECTED)
        run.send()
        run.collect()
        run.talk(DONE, until=DONE)
        return run.answer()
    finally:
        run.close()


class _Pair:
    """One connection, from an RNIC of this host to an RNIC of a peer."""

    def __init__(self, host: str, rnic: _Rnic, peer: dict[str, Any], peer_rnic: dict[str, Any], number: int) -> None:
        self.rnic = rnic
        self.peer = peer["name"]
        self.here = f"{host}:{rnic.name}"
        self.there = f"{peer['name']}:{peer_rnic['name']}"
        self.remote_address = peer_rnic["address"]
        self.number = number
        self.error: str | None = None
        self.request: Any = None  # kept alive while it is posted
        self.sent_ns = self.acknowledged_ns = 0
        self.arrived = False
        cap = QPCap(max_send_wr=1, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=rnic.cq, rcq=rnic.cq, cap=cap, sq_sig_all=1)
        self.qp = QP(rnic.pd, init, QPAttr(port_num=1))
        self.receive = RecvWR(wr_id=1, num_sge=1, sg=[rnic.sge(number, incoming=True)])
        self.qp.post_recv(self.receive)

    def finished(self) -> bool:
        return self.error is not None or (self.acknowledged_ns > 0 and self.arrived)


class _Rnic:
    """An open RNIC with one completion queue, and memory for all its pairs: 64 bytes out and 64 bytes in for each."""

    def __init__(self, requested: dict[str, Any], pairs: int) -> None:
        self.name = requested["name"]
        self.context = Context(name=self.name)
        self.gid_index = self._find_gid(requested["address"])
        self.pd = PD(self.context)
        self.cq = CQ(self.context, 4 * pairs)
        self.mr = MR(self.pd, 2 * SIZE * pairs, e.IBV_ACCESS_LOCAL_WRITE)

    def _find_gid(self, address: str) -> int:
        """Return the index of an address's RoCE v2 GID: the table may have the same GID for RoCE v1, too."""
        gid_text = gid_of(address)
        port = f"/sys/class/infiniband/{self.name}/ports/1"
        for index in sorted(int(entry) for entry in os.listdir(f"{port}/gids")):
            with contextlib.suppress(OSError):  # reading the type of an empty entry is EINVAL
                if _line(f"{port}/gids/{index}") == gid_text and _line(f"{port}/gid_attrs/types/{index}") == "RoCE v2":
                    return index
        raise OSError(f"{self.name} has no RoCE v2 GID ::ffff:{address}")

    def sge(self, number: int, *, incoming: bool) -> Any:
        offset = (2 * number + incoming) * SIZE
        return SGE(self.mr.buf + offset, SIZE, self.mr.lkey)


def _line(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read().strip()


class _Run:
    """One ping: the RNICs of this host, its pairs, and the last state that each peer has sent (`heard`)."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.host = request["host"]
        self.deadline = time.monotonic() + request["deadline_s"]
        self.addresses = {peer["name"]: peer["address"] for peer in request["peers"]}
        self.rnics: list[_Rnic] = []
        self.pairs: list[_Pair] = []
        self.by_qpn: dict[tuple[str, int], _Pair] = {}
        self.phase = KNOWN
        self.heard: dict[str, dict[str, Any]] = {}  # peer -> its last state
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((request["address"], PORT))

    def make(self) -> None:
        """Open the RNICs and create the QP of every pair, with a receive posted before it is connected."""
        count = sum(len(peer["rnics"]) for peer in self.request["peers"])
        for requested in self.request["rnics"]:
            rnic = _Rnic(requested, count)
            self.rnics.append(rnic)
            peer_rnics = [(peer, peer_rnic) for peer in self.request["peers"] for peer_rnic in peer["rnics"]]
            for number, (peer, peer_rnic) in enumerate(peer_rnics):
                pair = _Pair(self.host, rnic, peer, peer_rnic, number)
                self.pairs.append(pair)
                self.by_qpn[rnic.name, pair.qp.qp_num] = pair

    def connect(self) -> None:
        """Move every pair whose other end is known to RTS."""
        for pair in self.pairs:
            ends = self.heard.get(pair.peer, {}).get("ends", {})
            qpn = ends.get(f"{pair.there} > {pair.here}")
            if qpn is None:
                pair.error = f"{pair.peer} sent no datagram on the front end ({self.addresses[pair.peer]})"
                continue
            route = GlobalRoute(dgid=GID(gid_of(pair.remote_address)), sgid_index=pair.rnic.gid_index, hop_limit=64)
            attr = QPAttr(port_num=1)
            attr.path_mtu = e.IBV_MTU_4096
            attr.dest_qp_num = qpn
            attr.rq_psn = attr.sq_psn = 0
            attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
            attr.min_rnr_timer = MIN_RNR_TIMER
            attr.timeout = TIMEOUT
            attr.retry_cnt = attr.rnr_retry = FOR_EVER
            attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
            try:
                pair.qp.to_rts(attr)
            except PyverbsError as error:
                pair.error = f"cannot connect; check the route to {pair.remote_address} ({error})"

    def send(self) -> None:
        """Post one send on every connected pair.

        The request objects are kept, because pyverbs holds only C pointers.
        """
        for pair in self.pairs:
            if pair.error is None:
                payload = self._payload(pair.here, pair.there)
                pair.rnic.mr.write(payload, SIZE, 2 * pair.number * SIZE)
                pair.request = SendWR(
                    wr_id=0,
                    opcode=e.IBV_WR_SEND,
                    num_sge=1,
                    sg=[pair.rnic.sge(pair.number, incoming=False)],
                    send_flags=e.IBV_SEND_SIGNALED,
                )
                pair.sent_ns = time.monotonic_ns()
                pair.qp.post_send(pair.request)

    def collect(self) -> None:
        """Collect completions until every pair is finished or the deadline passes."""
        while not all(pair.finished() for pair in self.pairs):
            if time.monotonic() > self.deadline:
                return
            idle = True
            for rnic in self.rnics:
                for completion in rnic.cq.poll(16)[1]:
                    self._completed(self.by_qpn[rnic.name, completion.qp_num], completion)
                    idle = False
            if idle:
                self._listen(POLL_S)

    def _completed(self, pair: _Pair, completion: Any) -> None:
        if completion.status != e.IBV_WC_SUCCESS:
            pair.error = pair.error or f"work completion with status {completion.status}"
        elif completion.wr_id == 0:
            pair.acknowledged_ns = time.monotonic_ns()
        else:
            payload = pair.rnic.mr.read(SIZE, (2 * pair.number + 1) * SIZE)
            if payload == self._payload(pair.there, pair.here):
                pair.arrived = True
            else:
                pair.error = f"wrong bytes arrived: {payload.hex()}"

    def talk(self, phase: int, *, until: int) -> None:
        """Repeat this host's state until every peer has reported that it reached `until`, or the deadline passes."""
        self.phase = phase
        sent_s = 0.0
        while True:
            now = time.monotonic()
            if now - sent_s >= REPEAT_S or sent_s == 0.0:
                self._send_state(self.addresses)
                sent_s = now
            behind = [name for name in self.addresses if self.heard.get(name, {"phase": -1})["phase"] < until]
            if not behind:
                self._send_state(self.addresses)  # a peer may still be waiting for this state
                return
            if now > self.deadline:
                return
            self._listen(REPEAT_S)

    def _send_state(self, names: Iterable[str]) -> None:
        for name in names:
            ends = {f"{pair.here} > {pair.there}": pair.qp.qp_num for pair in self.pairs if pair.peer == name}
            state = {"run": self.request["run"], "from": self.host, "phase": self.phase, "ends": ends}
            with contextlib.suppress(OSError):  # no ARP reply yet: the state is repeated soon
                self.socket.sendto(json.dumps(state).encode(), (self.addresses[name], PORT))

    def _listen(self, timeout_s: float) -> None:
        while select.select([self.socket], [], [], timeout_s)[0]:
            timeout_s = 0
            with contextlib.suppress(OSError, ValueError):
                state = json.loads(self.socket.recv(65536))
                if state.get("run") == self.request["run"] and state.get("from") in self.addresses:
                    self.heard[state["from"]] = state
                    if state["phase"] < self.phase:
                        self._send_state([state["from"]])

    def _payload(self, source: str, target: str) -> bytes:
        return hashlib.sha512(f"{self.request['run']} {source} > {target}".encode()).digest()

    def answer(self) -> dict[str, Any]:
        """Return the answer of the whole run."""
        failed: dict[str, list[str]] = {}
        slowest_ns = 0
        for pair in self.pairs:
            if pair.error is None and not pair.acknowledged_ns:
                pair.error = f"not acknowledged within {self.request['deadline_s']:.0f} s"
            elif pair.error is None and not pair.arrived:
                pair.error = f"nothing arrived within {self.request['deadline_s']:.0f} s"
            if pair.error is not None:
                failed.setdefault(pair.error, []).append(f"{pair.here} > {pair.there}")
            else:
                slowest_ns = max(slowest_ns, pair.acknowledged_ns - pair.sent_ns)
        failures = [f"{', '.join(pairs)}: {error}" for error, pairs in failed.items()]
        return {"pairs": len(self.pairs), "failed": failures, "slowest_us": slowest_ns / 1000}

    def close(self) -> None:
        """Close the socket and all verbs objects, inner ones first."""
        self.socket.close()
        for pair in self.pairs:
            pair.qp.close()
        for rnic in self.rnics:
            rnic.mr.close()
            rnic.cq.close()
            rnic.pd.close()
            rnic.context.close()


if __name__ == "__main__":
    print(json.dumps(ping(json.load(sys.stdin))))
