"""Faults of hosts: freeze, reboot, CPU and memory pressure, clock step, full disk, killed or hung rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from faultbed.inject.mechanisms.mechanism import (
    Mechanism,
    Place,
    Request,
    Step,
    Witness,
    holder_request,
    on_host,
    rnic_counters,
)
from faultbed.inject.mechanisms.soft.processes import signalled, stopped
from faultbed.inject.node.machine.disk import FOLDER
from faultbed.inject.node.machine.vmreset import REPROVISION_DEADLINE_S
from faultbed.testbed.errors import UsageError

__all__ = ["BY_KIND"]

# The traffic process of a host, by an argument of its command line.
ENGINE = "faultbed.traffic.node.engine"
# Other tasks must have waited for at least this share of the busy time. Otherwise nothing competed for the CPU.
_LEAST_WAIT_SHARE = 0.1
# Tasks must have waited this long for memory; a healthy machine has shorter stalls.
_STALLED_US = 10_000
_LEAST_STEP_S = 2


def _freeze(request: Request) -> Mechanism:
    host = request.target.node
    return Mechanism(
        place=Place(node=host, local=True),
        request=holder_request(
            request, "process", {"host": host, "find": {"comm": "qemu-system"}, "how": "STOP"}, claims=host
        ),
        steps=(Step(do=f"kill -STOP <QEMU of {host}>", undo=f"kill -CONT <QEMU of {host}>"),),
        must_move=(Witness(any_of=rnic_counters(request.topology, "completer_retry_err", but=host)),),
        must_not_move=rnic_counters(request.topology, "send_err"),
        shows={"host": host},
    )


def _reboot(request: Request) -> Mechanism:
    host = request.target.node
    netdevs = [rnic.netdev for rnic in request.topology.host_by_name[host].rnics]
    return Mechanism(
        place=Place(node=host, local=True),
        request=holder_request(request, "vm_reset", {"host": host}, claims=host, patience_s=REPROVISION_DEADLINE_S),
        steps=(
            Step(
                do=f"QMP system_reset of {host}",
                undo=f"# nothing: wait for SSH, then ansible-playbook playbooks/provision.yml --limit {host}",
            ),
        ),
        must_move=(Witness(any_of=(f"{host}/boots",)),),
        must_not_move=rnic_counters(request.topology, "send_err", but=host),
        restored=tuple((f"{host}/{netdev}.{state}", 1) for netdev in netdevs for state in ("up", "carrier")),
        shows={"host": host, "resets": 1},
        complete_after=1,
    )


def _steal(request: Request) -> Mechanism:
    host, share = request.target.node, request.spec.params["share"]
    args = {"count": 1, "share": share, "realtime": True}
    waited_us = round(request.spec.for_s * share * _LEAST_WAIT_SHARE * 1e6)
    return Mechanism(
        place=on_host(request),
        request=holder_request(request, "hog", args, claims=f"{host}/hog"),
        steps=(
            Step(do=f"chrt -f 5 sh -c 'while :; do :; done' &   # busy for {share:g} of each 10 ms", undo="kill %1"),
        ),
        must_move=(Witness(any_of=(f"{host}/cpu0.wait_us",), at_least=waited_us),),
        must_not_move=rnic_counters(request.topology, "send_err"),
        shows={"cgroup": None},
        # Tasks wait on any busy machine, so the busy process itself is counted, independently of the holder.
        while_on=((f"{host}/hogs.running", 1),),
        restored=((f"{host}/hogs.running", 0),),
    )


def _memory(request: Request) -> Mechanism:
    host, left_mib = request.target.node, request.spec.params["left"]
    return Mechanism(
        place=on_host(request),
        request=holder_request(request, "memory", {"left_mib": left_mib}, claims=f"{host}/memory"),
        steps=(Step(do=f"# hold all memory but {left_mib} MiB, with oom_score_adj 1000", undo="kill %1"),),
        must_move=(Witness(any_of=(f"{host}/memory.stalled_us",), at_least=_STALLED_US),),
        must_not_move=rnic_counters(request.topology, "send_err"),
        shows={"left_mib": left_mib},
    )


def _rank_kill(request: Request) -> Mechanism:
    # Its peers need not notice: while all ranks compute, none sends to it, and later the job has already failed.
    return signalled(request, ENGINE, "KILL", while_on=((f"{request.target.node}/engines.running", 0),))


def _rank_hang(request: Request) -> Mechanism:
    return stopped(request, ENGINE)


def _clock(request: Request) -> Mechanism:
    host, step_s = request.target.node, request.spec.params["step"]
    state = f"{host}/clock.stepped"
    if abs(step_s) < _LEAST_STEP_S:
        raise UsageError(
            f"{request.where}.step: {step_s} s is too small to distinguish from a delayed clock reading; step "
            f"{_LEAST_STEP_S} s or more"
        )
    return Mechanism(
        place=on_host(request),
        request=holder_request(request, "clock_step", {"step_s": step_s}, claims=f"{host}/clock"),
        steps=(
            Step(
                do=f"date --set='{step_s} seconds'   # CLOCK_REALTIME only",
                undo="<restore the offset to the uptime>",
            ),
        ),
        must_move=(),
        must_not_move=rnic_counters(request.topology, "send_err"),
        restored=((state, 0),),
        shows={"stepped_s": step_s},
        while_on=((state, step_s),),
    )


def _disk(request: Request) -> Mechanism:
    host = request.target.node
    state = f"{host}/disk.full"
    return Mechanism(
        place=on_host(request),
        request=holder_request(request, "disk", {}, claims=f"{host}/disk"),
        steps=(
            Step(
                do=f"f=$(mktemp -p {FOLDER}); exec 3<>$f; rm $f; fallocate -l <all that is left> /dev/fd/3",
                undo="exec 3>&-   # it also ends with the holder",
            ),
        ),
        must_move=(),
        must_not_move=rnic_counters(request.topology, "send_err"),
        restored=((state, 0),),
        shows={"folder": FOLDER},
        while_on=((state, 1),),
    )


BY_KIND: Mapping[str, Callable[[Request], Mechanism]] = {
    "host.freeze": _freeze,
    "host.reboot": _reboot,
    "host.cpu-steal": _steal,
    "host.memory-pressure": _memory,
    "host.clock-step": _clock,
    "host.disk-full": _disk,
    "host.rank-kill": _rank_kill,
    "host.rank-hang": _rank_hang,
}
