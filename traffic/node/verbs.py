"""The verbs that the engine needs, over pyverbs: an RNIC with its completion channel, and a reliable connection.

Limitations of pyverbs 56 that shape this module:

- SGE, SendWR and RecvWR objects are never freed (fixed by rdma-core 829cd7252, after v64): requests are created once
  and posted repeatedly.
- `CompChannel` does not expose its file descriptor, and its wait holds the GIL. The descriptor is identified as the new
  entry in /proc/self/fd, made non-blocking, and waited on with a selector.
- A chain linked by `next_wr` holds C pointers only: the caller must keep all Python objects alive.
- Each object looks up a logger, also that of a completion. `logging.getLogger` takes a lock and several calls for that,
  so its results are cached.
- Its constants exist twice, in `enums` and in `libibverbs_enums`, and its own modules import both. Creating 445 enum
  members costs an emulated CPU 0.4 s, so `libibverbs_enums` is registered under both names.
"""
# ruff: noqa: E402 (before pyverbs' other modules import it)

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys

try:
    import pyverbs.libibverbs_enums as e
except ImportError:  # another version of pyverbs
    import pyverbs.enums as e
sys.modules.setdefault("pyverbs.enums", e)

from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, CompChannel
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsRDMAError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

from faultbed.testbed.node.kernel_files import gid_of
from faultbed.traffic.node.completions import CQ_ENTRIES

TYPE_CHECKING = False  # importing typing costs an emulated CPU 0.2 s
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "STATUS",
    "VERBS",
    "GidMissing",
    "MtuTooLarge",
    "RcQp",
    "Rnic",
    "recv_request",
    "request",
    "write_request",
]

STATUS = {
    value: name[7:]
    for name, value in vars(e).items()
    if name.startswith("IBV_WC_") and (name.endswith("_ERR") or name == "IBV_WC_SUCCESS")
}
"""Names of work completion statuses (`ibv_wc_status`) without their prefix."""

ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_ATOMIC
VERBS = {
    "write": e.IBV_WR_RDMA_WRITE,
    "write-imm": e.IBV_WR_RDMA_WRITE_WITH_IMM,
    "send": e.IBV_WR_SEND,
    "send-imm": e.IBV_WR_SEND_WITH_IMM,
    "read": e.IBV_WR_RDMA_READ,
    "atomic": e.IBV_WR_ATOMIC_FETCH_AND_ADD,
}
POLL = 32
logging.getLogger = functools.cache(logging.getLogger)
SYSFS = "/sys/class/infiniband"


class GidMissing(Exception):  # named for the condition, as in faultbed.testbed.errors
    """The RNIC has no RoCE v2 GID for the address (yet): its netdev is down, or the address is on another netdev."""


class MtuTooLarge(Exception):  # as GidMissing
    """The RNIC's port carries a smaller MTU than the QP requires."""


def _event_fds() -> set[int]:
    collected = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if "infinibandevent" in os.readlink(f"/proc/self/fd/{name}"):
                collected.add(int(name))
        except OSError:  # the descriptor of the listing itself
            continue
    return collected


def _comp_channel(context: Context) -> tuple[CompChannel, int]:
    before = _event_fds()
    channel = CompChannel(context)
    (fd,) = _event_fds() - before
    os.set_blocking(fd, False)
    return channel, fd


class Rnic:
    """An open RDMA device with one protection domain and one completion queue, shared by all tasks on it."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.context = Context(name=name)
        self.pd = PD(self.context)
        self.channel, self.fd = _comp_channel(self.context)
        self.cq_entries = min(CQ_ENTRIES, self.context.query_device().max_cqe)
        self.cq = CQ(self.context, self.cq_entries, None, self.channel, 0)
        self.cq.req_notify()

    def gid_index(self) -> int:
        """Return the index of the RoCE v2 GID with this RNIC's address.

        A link flap can move the GID to another index, so it is looked up each time.

        Raises:
            GidMissing: the RNIC has no such GID.
        """
        gid_text = gid_of(self.address)
        port = f"{SYSFS}/{self.name}/ports/1"
        for index in sorted(int(entry) for entry in os.listdir(f"{port}/gids")):
            try:
                with open(f"{port}/gids/{index}", encoding="ascii") as gid:
                    if gid.read().strip() != gid_text:
                        continue
                with open(f"{port}/gid_attrs/types/{index}", encoding="ascii") as kind:
                    if "v2" in kind.read():
                        return index
            except OSError:  # reading the type of an empty entry is EINVAL
                continue
        raise GidMissing(f"{self.name} has no RoCE v2 GID for {self.address}")

    def check_mtu(self, mtu: int) -> None:
        """Reject a path MTU larger than the port's: the packets would be dropped without any error.

        Raises:
            MtuTooLarge: the path MTU is larger than the port's.
        """
        active = 128 << self.context.query_port(1).active_mtu
        if mtu > active:
            raise MtuTooLarge(
                f"a path MTU of {mtu} is more than the {active} of {self.name}'s port; check the MTU of its netdev"
            )

    def register(self, address: int, size: int) -> MR:
        """Register memory for local use and all remote access. The caller keeps the memory alive."""
        return MR(self.pd, size, ACCESS, address=address)

    def register_dmabuf(self, fd: int, size: int) -> MR:
        """Register a dma-buf (kernel: Documentation/driver-api/dma-buf.rst). For verbs it begins at address 0."""
        from pyverbs.mr import DmaBufMR

        return DmaBufMR(self.pd, size, ACCESS, dmabuf=fd, offset=0)

    def clear_event(self) -> None:
        """Remove the event from the completion channel, after the descriptor became readable."""
        with contextlib.suppress(PyverbsRDMAError):  # EAGAIN: no event; the polls that follow are authoritative
            self.channel.get_cq_event(self.cq)
            self.cq.ack_events(1)

    def poll(self) -> list[Any]:
        """Return the next completions, at most `POLL`. If fewer are returned, none was left."""
        completions: list[Any] = self.cq.poll(POLL)[1]
        return completions

    def drain(self) -> list[Any]:
        """Arm the next notification and return all completions.

        A completion between the two is either returned now or raises the next event.
        """
        self.cq.req_notify()
        collected = []
        while True:
            completions = self.poll()
            collected += completions
            if len(completions) < POLL:
                return collected


class RcQp:
    """One end of a reliable connection. It is created in RESET and moved to INIT at once; `connect` moves it to RTS."""

    kind = e.IBV_QPT_RC

    def __init__(self, rnic: Rnic, *, sends: int, receives: int, psn: int, params: dict[str, Any]) -> None:
        self.rnic = rnic
        self.params = params
        self.psn = psn
        cap = QPCap(max_send_wr=sends, max_recv_wr=receives, max_send_sge=1, max_recv_sge=1, max_inline_data=0)
        init = QPInitAttr(qp_type=self.kind, scq=rnic.cq, rcq=rnic.cq, cap=cap, sq_sig_all=0)
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = ACCESS
        self.qp = QP(rnic.pd, init, attr)
        self.qpn = self.qp.qp_num
        self.post_send = self.qp.post_send
        self.post_recv = self.qp.post_recv

    def route_to(self, peer: dict[str, Any]) -> GlobalRoute:
        """Return the route to a peer's `address`, using the current GID of this RNIC."""
        return GlobalRoute(
            dgid=GID(gid_of(peer["address"])),
            sgid_index=self.rnic.gid_index(),
            hop_limit=64,
            traffic_class=self.params.get("traffic_class", 0),
            flow_label=self.params.get("flow_label", 0),
        )

    def connect(self, peer: dict[str, Any]) -> None:
        """Move to RTS towards `peer` (`address`, `qpn`, `psn`).

        Resolving the next hop may take seconds and may fail.
        """
        params, route = self.params, self.route_to(peer)
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = ACCESS
        attr.path_mtu = {1024: e.IBV_MTU_1024, 2048: e.IBV_MTU_2048, 4096: e.IBV_MTU_4096}[params["mtu"]]
        attr.dest_qp_num = peer["qpn"]
        attr.rq_psn = peer["psn"]
        attr.sq_psn = self.psn
        attr.max_rd_atomic = params.get("rd_atomic", 1)  # reads and atomics that may be outstanding
        attr.max_dest_rd_atomic = params.get("rd_atomic", 1)
        attr.min_rnr_timer = params["min_rnr_timer"]
        attr.timeout = params["timeout"]
        attr.retry_cnt = params["retry_cnt"]
        attr.rnr_retry = params["rnr_retry"]
        attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
        self.qp.to_rts(attr)

    def psns(self) -> tuple[int, int]:
        """Return the next PSN to send and the next PSN expected. rxe reports live values."""
        attr, _ = self.qp.query(e.IBV_QP_SQ_PSN | e.IBV_QP_RQ_PSN)
        return attr.sq_psn, attr.rq_psn

    def halt(self) -> None:
        """Move to the error state: nothing is sent or accepted any more, and all requests are flushed."""
        attr = QPAttr(port_num=1)
        attr.qp_state = e.IBV_QPS_ERR
        self.qp.modify(attr, e.IBV_QP_STATE)

    def close(self) -> None:
        """Destroy the QP. Completions already queued carry its number, which is not reused soon."""
        self.qp.close()


def request(verb: str, *, wr_id: int, mr: MR, address: int, size: int, signalled: bool) -> tuple[SendWR, SGE]:
    """Build a request of `size` bytes, one of `VERBS`.

    Keep both objects alive; the SGE may be changed between posts.
    """
    sge = SGE(address, size, mr.lkey)
    built = SendWR(
        wr_id=wr_id,
        opcode=VERBS[verb],
        num_sge=1,
        sg=[sge],
        send_flags=e.IBV_SEND_SIGNALED if signalled else 0,
    )
    built.sg_list = sge  # instead of the private copy, so that a change of the SGE reaches the next post
    if not size:
        built.num_sge = 0
    return built, sge


def write_request(*, wr_id: int, mr: MR, address: int, size: int, imm: bool, signalled: bool) -> tuple[SendWR, SGE]:
    """Build an RDMA write, optionally with immediate (see `request`)."""
    verb = "write-imm" if imm else "write"
    return request(verb, wr_id=wr_id, mr=mr, address=address, size=size, signalled=signalled)


def recv_request(wr_id: int, mr: MR, size: int = 0, offset: int = 0) -> RecvWR:
    """Build a receive: for a send of `size` bytes, or without a buffer for the notification of a write with immediate.

    The buffer begins at `offset` of the memory. One object serves all posts.
    """
    built = RecvWR(wr_id=wr_id, num_sge=1, sg=[SGE(mr.buf + offset, size, mr.lkey)])
    if not size:
        built.num_sge = 0
    return built
