"""Mechanisms for the processes of a program on a host: stopped or killed by signal, or limited in CPU."""

from __future__ import annotations

from faultbed.inject.mechanisms.mechanism import (
    Mechanism,
    Request,
    Step,
    Witness,
    holder_request,
    on_host,
    rnic_counters,
)

__all__ = ["limited", "signalled", "stopped"]

_PERIOD_US = 20_000


def signalled(
    request: Request,
    argument: str,
    signal: str,
    *,
    must_move: tuple[Witness, ...] = (),
    while_on: tuple[tuple[str, int | None], ...] = (),
    restored: tuple[tuple[str, int | None], ...] = (),
) -> Mechanism:
    """Return the mechanism that sends a signal (STOP or KILL) to every process with `argument` in its command line."""
    undo = f"pkill -CONT -f {argument}" if signal == "STOP" else "# nothing: the job has to start it again"
    return Mechanism(
        place=on_host(request),
        request=holder_request(
            request,
            "process",
            {"find": {"argument": argument}, "how": signal},
            claims=f"{request.target.node}/{argument}",
        ),
        steps=(Step(do=f"pkill -{signal} -f {argument}", undo=undo),),
        must_move=must_move,
        must_not_move=rnic_counters(request.topology, "send_err"),
        restored=restored,
        of_workload=True,
        shows={"what": argument},
        while_on=while_on,
        complete_after=1 if signal == "KILL" else None,
    )


def stopped(request: Request, argument: str) -> Mechanism:
    """Return the mechanism that stops the processes (SIGSTOP).

    Counters must show one stopped process while the fault is on, and none afterwards.
    """
    state = f"{request.target.node}/processes.stopped"
    return signalled(request, argument, "STOP", while_on=((state, 1),), restored=((state, 0),))


def limited(request: Request, argument: str, cgroup: str, percent: float) -> Mechanism:
    """Return the mechanism that limits the processes to `percent` of a CPU, in a control group of their own."""
    group = f"{request.target.node}/{_group_name(cgroup)}"
    quota_us = max(1000, round(_PERIOD_US * percent / 100))
    value = f"{quota_us} {round(quota_us * 100 / percent)}"
    state = f"{group}.quota_us"
    return Mechanism(
        place=on_host(request),
        request=holder_request(
            request, "limit", {"argument": argument, "cgroup": cgroup, "value": value}, claims=group
        ),
        steps=(
            Step(
                do=f"mkdir {cgroup}; echo {value} > {cgroup}/cpu.max; pgrep -f {argument} > {cgroup}/cgroup.procs",
                undo=f"<back to the previous cgroup>; rmdir {cgroup}",
            ),
        ),
        must_move=(),
        must_not_move=rnic_counters(request.topology, "send_err"),
        restored=((state, None),),
        of_workload=True,
        shows={"cgroup": cgroup},
        while_on=((state, quota_us),),
    )


def _group_name(cgroup: str) -> str:
    """Return the group's name as in `faultbed.testbed.node.counts`: `/…/faultbed-ranks.service` is `ranks`."""
    return cgroup.rpartition("/faultbed-")[2].removesuffix(".service")
