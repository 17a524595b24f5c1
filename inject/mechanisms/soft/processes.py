"""What is done to the processes of a program on a host: stopped or killed by signal, or given little CPU."""

from __future__ import annotations

from inject.mechanisms.mechanism import Request, Shot, Step, Witness, held, on_host, rnic_counters

__all__ = ["limited", "signalled", "stopped"]

_PERIOD_US = 20_000


def signalled(
    asked: Request,
    argument: str,
    how: str,
    *,
    must_move: tuple[Witness, ...] = (),
    while_on: tuple[tuple[str, int | None], ...] = (),
    restored: tuple[tuple[str, int | None], ...] = (),
) -> Shot:
    """Every process that has `argument` in its command line gets the signal `how`."""
    undo = f"pkill -CONT -f {argument}" if how == "STOP" else "# it is dead; who needs it has to start it again"
    return Shot(
        place=on_host(asked),
        request=held(
            asked,
            "process",
            {"find": {"argument": argument}, "how": how},
            claims=f"{asked.target.node}/{argument}",
        ),
        steps=(Step(do=f"pkill -{how} -f {argument}", undo=undo),),
        must_move=must_move,
        must_not_move=rnic_counters(asked.topology, "send_err"),
        restored=restored,
        of_workload=True,
        shows={"what": argument},
        while_on=while_on,
        complete_after=1 if how == "KILL" else None,
    )


def stopped(asked: Request, argument: str) -> Shot:
    """SIGSTOP; a second look finds a stopped process meanwhile, and none after."""
    state = f"{asked.target.node}/processes.stopped"
    return signalled(asked, argument, "STOP", while_on=((state, 1),), restored=((state, 0),))


def limited(asked: Request, argument: str, cgroup: str, percent: float) -> Shot:
    """Its processes get `percent` of a CPU, by a control group of their own."""
    group = f"{asked.target.node}/{_group_name(cgroup)}"
    quota_us = max(1000, round(_PERIOD_US * percent / 100))
    value = f"{quota_us} {round(quota_us * 100 / percent)}"
    state = f"{group}.quota_us"
    return Shot(
        place=on_host(asked),
        request=held(asked, "limit", {"argument": argument, "cgroup": cgroup, "value": value}, claims=group),
        steps=(
            Step(
                do=f"mkdir {cgroup}; echo {value} > {cgroup}/cpu.max; pgrep -f {argument} > {cgroup}/cgroup.procs",
                undo=f"<back to where it was>; rmdir {cgroup}",
            ),
        ),
        must_move=(),
        must_not_move=rnic_counters(asked.topology, "send_err"),
        restored=((state, None),),
        of_workload=True,
        shows={"cgroup": cgroup},
        while_on=((state, quota_us),),
    )


def _group_name(cgroup: str) -> str:
    """As `testbed.node.counts` has it: `/…/faultbed-ranks.service` is `ranks`."""
    return cgroup.rpartition("/faultbed-")[2].removesuffix(".service")
