"""Faults of hosts: frozen, rebooted, robbed of CPU or memory, a clock stepped, a disk full, a rank killed or hung."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from inject.mechanisms.mechanism import Place, Request, Shot, Step, Witness, held, on_host, rnic_counters
from inject.mechanisms.soft.processes import signalled, stopped
from inject.node.machine.disk import FOLDER
from testbed.errors import UsageError

__all__ = ["BY_KIND"]

# The process of traffic that runs on a host, by an argument of its command line.
ENGINE = "traffic.node.engine"
# Of the time that the thief was busy somebody must have waited at least this share: else nobody was robbed.
_ROBBED = 0.1
# Somebody waited for memory, and not for the wink that any machine does now and then.
_STALLED_US = 10_000
_LEAST_STEP_S = 2
# A boot and provisioning, both under emulation and each with its own deadline (testbed.backends.soft.fleet, provision).
_BACK_S = 900.0


def _freeze(asked: Request) -> Shot:
    host = asked.target.node
    return Shot(
        place=Place(node=host, local=True),
        request=held(asked, "process", {"host": host, "find": {"comm": "qemu-system"}, "how": "STOP"}, claims=host),
        steps=(Step(do=f"kill -STOP <QEMU of {host}>", undo=f"kill -CONT <QEMU of {host}>"),),
        must_move=(Witness(any_of=rnic_counters(asked.topology, "completer_retry_err", but=host)),),
        must_not_move=rnic_counters(asked.topology, "send_err"),
        shows={"host": host},
    )


def _reboot(asked: Request) -> Shot:
    host = asked.target.node
    netdevs = [rnic.netdev for rnic in asked.topology.host_by_name[host].rnics]
    return Shot(
        place=Place(node=host, local=True),
        request=held(asked, "vm_reset", {"host": host}, claims=host, patience_s=_BACK_S),
        steps=(
            Step(
                do=f"QMP system_reset of {host}",
                undo=f"# nothing: wait until it answers, then ansible-playbook playbooks/provision.yml --limit {host}",
            ),
        ),
        must_move=(Witness(any_of=(f"{host}/boots",)),),
        must_not_move=rnic_counters(asked.topology, "send_err", but=host),
        restored=tuple((f"{host}/{netdev}.{state}", 1) for netdev in netdevs for state in ("up", "carrier")),
        shows={"host": host, "resets": 1},
        complete_after=1,
    )


def _steal(asked: Request) -> Shot:
    host, share = asked.target.node, asked.params["share"]
    args = {"count": 1, "share": share, "realtime": True}
    waited_us = round(asked.for_s * share * _ROBBED * 1e6)
    return Shot(
        place=on_host(asked),
        request=held(asked, "hog", args, claims=f"{host}/hog"),
        steps=(
            Step(do=f"chrt -f 5 sh -c 'while :; do :; done' &   # busy for {share:g} of each 10 ms", undo="kill %1"),
        ),
        must_move=(Witness(any_of=(f"{host}/cpu0.wait_us",), at_least=waited_us),),
        must_not_move=rnic_counters(asked.topology, "send_err"),
        shows={"cgroup": None},
        # On a busy machine somebody always waits: that the thief is here is seen by another way than the holder's.
        while_on=((f"{host}/hogs.running", 1),),
        restored=((f"{host}/hogs.running", 0),),
    )


def _memory(asked: Request) -> Shot:
    host, left_mib = asked.target.node, asked.params["left"]
    return Shot(
        place=on_host(asked),
        request=held(asked, "memory", {"left_mib": left_mib}, claims=f"{host}/memory"),
        steps=(Step(do=f"# hold all memory but {left_mib} MiB, with oom_score_adj 1000", undo="kill %1"),),
        must_move=(Witness(any_of=(f"{host}/memory.stalled_us",), at_least=_STALLED_US),),
        must_not_move=rnic_counters(asked.topology, "send_err"),
        shows={"left_mib": left_mib},
    )


def _rank_kill(asked: Request) -> Shot:
    # Its peers need not notice: while all compute, nobody sends to it, and then the job has failed already.
    return signalled(asked, ENGINE, "KILL", while_on=((f"{asked.target.node}/engines.running", 0),))


def _rank_hang(asked: Request) -> Shot:
    return stopped(asked, ENGINE)


def _clock(asked: Request) -> Shot:
    host, step_s = asked.target.node, asked.params["step"]
    state = f"{host}/clock.stepped"
    if abs(step_s) < _LEAST_STEP_S:
        raise UsageError(
            f"{asked.where}.step: {step_s} s cannot be told from a slow look; step {_LEAST_STEP_S} s or more"
        )
    return Shot(
        place=on_host(asked),
        request=held(asked, "clock_step", {"step_s": step_s}, claims=f"{host}/clock"),
        steps=(
            Step(
                do=f"date --set='{step_s} seconds'   # CLOCK_REALTIME only",
                undo="<as far from the uptime as it was>",
            ),
        ),
        must_move=(),
        must_not_move=rnic_counters(asked.topology, "send_err"),
        restored=((state, 0),),
        shows={"stepped_s": step_s},
        while_on=((state, step_s),),
    )


def _disk(asked: Request) -> Shot:
    host = asked.target.node
    state = f"{host}/disk.full"
    return Shot(
        place=on_host(asked),
        request=held(asked, "disk", {}, claims=f"{host}/disk"),
        steps=(
            Step(
                do=f"f=$(mktemp -p {FOLDER}); exec 3<>$f; rm $f; fallocate -l <all that is left> /dev/fd/3",
                undo="exec 3>&-   # it also ends with the holder",
            ),
        ),
        must_move=(),
        must_not_move=rnic_counters(asked.topology, "send_err"),
        restored=((state, 0),),
        shows={"folder": FOLDER},
        while_on=((state, 1),),
    )


BY_KIND: Mapping[str, Callable[[Request], Shot]] = {
    "host.freeze": _freeze,
    "host.reboot": _reboot,
    "host.cpu-steal": _steal,
    "host.memory-pressure": _memory,
    "host.clock-step": _clock,
    "host.disk-full": _disk,
    "host.rank-kill": _rank_kill,
    "host.rank-hang": _rank_hang,
}
