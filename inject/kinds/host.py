"""Hosts: freeze, reboot, CPU and memory pressure, clock step, full disk, killed and hung ranks."""

from __future__ import annotations

from faultbed.inject.kinds.effect import NOTHING, always
from faultbed.inject.kinds.kind import Example, Param, Trait, described
from faultbed.inject.kinds.processes import STOPPED_MUST_MOVE

__all__ = ["KINDS"]

_FREEZE = described(
    name="host.freeze",
    summary="the whole host stops (SIGSTOP of its VM); its clock continues",
    binding={"host": "local"},
    params=(),
    fidelity={"soft": "emulated"},
    armed_by="the state of QEMU's process in /proc",
    must_move="completer_retry_err of another host's RNIC",
    must_not_move="rxe send_err",
    reversible=True,
    traits=frozenset({Trait.WHOLE_TARGET}),
    may_fail=("workload",),
    example=Example(target="host1"),
    colour="#3d405b",
)

_REBOOT = described(
    name="host.reboot",
    summary="the host reboots without closing anything (QEMU resets its VM; its switch ports keep their carrier); "
    "it cannot be reverted, and ends when the host is provisioned again",
    binding={"host": "local"},
    params=(),
    fidelity={"soft": "real"},
    armed_by="QEMU's event RESET",
    must_move="the id of the host's boot, with an uptime that began after the fault (boot_id, uptime in /proc)",
    must_not_move="rxe send_err of the other hosts",
    reversible=False,
    traits=frozenset({Trait.WHOLE_TARGET, Trait.CARRIER}),
    may_fail=("workload",),
    example=Example(target="host1"),
    colour="#6a040f",
)

_STEAL = described(
    name="host.cpu-steal",
    summary="a busy process takes a share of the host's CPU, with priority over everything else",
    binding={"host": "unit"},
    params=(
        Param(name="share", type="number", unit="", summary="share of the CPU", low=0.05, high=0.9, required=True),
    ),
    fidelity={"soft": "emulated"},
    armed_by="the busy process in /proc",
    must_move="time that tasks of the host waited to run (/proc/schedstat), and the busy process, counted while the "
    "fault is on, independently of the holder",
    must_not_move="rxe send_err",
    reversible=True,
    example=Example(target="host1", params={"share": 0.5}),
    colour="#81b29a",
)

_KILL = described(
    name="host.rank-kill",
    summary="SIGKILL of the host's rank; it cannot be reverted",
    binding={"host": "unit"},
    params=(),
    fidelity={"soft": "real"},
    armed_by="the traffic engine's process is gone from /proc",
    must_move="no counter; proof is that the traffic engine is gone, read while the fault is on, "
    "independently of the holder",
    must_not_move="rxe send_err",
    reversible=False,
    may_fail=("workload",),
    example=Example(target="host1"),
    colour="#9b2226",
)

_HANG = described(
    name="host.rank-hang",
    summary="the host's rank hangs (SIGSTOP); its RNIC still answers",
    binding={"host": "unit"},
    params=(),
    fidelity={"soft": "real"},
    armed_by="the traffic engine's state in /proc, by the holder and by the counters",
    must_move=STOPPED_MUST_MOVE,
    must_not_move="rxe send_err",
    reversible=True,
    may_fail=("workload",),
    example=Example(target="host1"),
    colour="#bb3e03",
)

_MEMORY = described(
    name="host.memory-pressure",
    summary="a process takes the host's memory except `left`; if memory runs out, the kernel kills this process first",
    binding={"host": "unit"},
    params=(
        Param(
            name="left",
            type="integer",
            unit="MiB",
            summary="memory that stays available",
            low=4,
            high=1 << 20,
            default=24,
        ),
    ),
    fidelity={"soft": "real"},
    armed_by="the process that holds it",
    must_move="time that processes of the host waited for memory (/proc/pressure/memory)",
    must_not_move="rxe send_err",
    reversible=True,
    example=Example(target="host1"),
    colour="#e07a5f",
)

_CLOCK = described(
    name="host.clock-step",
    summary="the host's wall clock is stepped, as by a wrong time server; nothing of the job may depend on it",
    binding={"host": "unit"},
    params=(
        Param(
            name="step",
            type="integer",
            unit="s",
            summary="size of the step; negative: backwards",
            low=-86_400,
            high=86_400,
            default=60,
        ),
    ),
    fidelity={"soft": "real"},
    armed_by="the wall clock against the uptime, by the holder and by the counters",
    must_move="no counter; proof is the stepped clock, read while the fault is on, independently of the holder",
    must_not_move="rxe send_err",
    reversible=True,
    traits=frozenset({Trait.NO_PACKET}),
    example=Example(target="host4", params={"step": -30}),
    colour="#5f0f40",
    effect=always(NOTHING),
)

_DISK = described(
    name="host.disk-full",
    summary="an unnamed open file takes all free space of the host's disk",
    binding={"host": "unit"},
    params=(),
    fidelity={"soft": "real"},
    armed_by="the open file, and the free space of the file system",
    must_move="no counter; proof is the full file system, read while the fault is on, independently of the holder",
    must_not_move="rxe send_err",
    reversible=True,
    traits=frozenset({Trait.NO_PACKET}),
    example=Example(target="host4"),
    colour="#997b66",
    effect=always(NOTHING),
)

KINDS = (_FREEZE, _REBOOT, _STEAL, _MEMORY, _CLOCK, _DISK, _KILL, _HANG)
