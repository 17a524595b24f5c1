"""Finds and reverts what faults left behind, without a journal and without knowing who left it.

It goes by marks, of which a fault that its target has not reverted has at least a unit or a stored revert: units
named `faultbed-fault-*`, stored reverts, nftables tables named `faultbed_*`, devices named `fbvia*` and the
redirections to them, a rule to the table that steers, rules and tables of routing schemes, a file that makes receives
late, busy processes and stopped ones, a CPU limit on a soft GPU, on ranks or on storage, ports of the topology that are
down, links of VMs without carrier. On a rack a port that is down may be somebody's maintenance, and a stopped process
somebody's debugging: there only ports that were up before the run that left the lab DIRTY are brought up, and only
programs of ours go on; all others are told as not ours, and left as they are.

One command a machine, all machines at once; one that does not answer does not keep the others waiting. What has no mark
of its own (a setting, a line of a configuration, a killed daemon) lives no longer than its machine, and so does its
stored revert. A machine of a soft lab that has booted lacks what provisioning makes: it is provisioned again.
"""

from __future__ import annotations

import contextlib
import secrets
import shlex
import subprocess
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

from inject import reprovision
from inject.channels import REJOIN, healed_file, revert_dir
from inject.node.holder import REVERT_DIR
from inject.node.machine.cgroup import UNLIMITED
from inject.node.machine.hog import NAME as HOG
from inject.node.machine.limit import CGROUPS
from inject.node.network.detour import GUEST, OWN
from inject.node.network.latereceives import FILE as LATE
from inject.node.network.scheme import SWEEP
from inject.node.network.steer import PRIORITY, TABLE
from inject.node.qmp import set_link
from testbed.errors import LabError, RevertFailed
from testbed.model.topology import Port
from testbed.node.holders import claim_file, end_holder, locked, read_claim
from testbed.node.routing.owned_numbers import PROTOCOL
from testbed.observe import counters
from testbed.observe.fingerprint import Fingerprint
from testbed.tenancy import dirty, interventions
from testbed.tenancy.reservation import covered

if TYPE_CHECKING:
    from testbed.lab import Lab

__all__ = ["PANIC_S", "heal", "is_foreign", "script"]

PANIC_S = 5.0
"""What `panic` should take. It is not cut off there: an emulated switch that has been idle needs more."""
_REVERT_S, _BACK_S = 30.0, 900.0
"""How long a revert beside QEMU may take; and one that waits for a host to boot."""
_UNMADE = "not made:"
# Where systemd keeps the control groups of transient units (systemd.slice(5)).
_SYSTEM_SLICE = "/sys/fs/cgroup/system.slice"
_MARK = "healed:"
_FOREIGN = "not ours:"

# What faults leave in one network namespace. A process costs a tenth of a second under emulation, so that the shell
# looks for words itself; `$1` says where it is.
_SWEEP = f"""\
for w in $(nft list tables netdev 2>/dev/null); do
  case $w in faultbed_*)
    if nft delete table netdev "$w"; then echo "{_MARK} removed nft table $w$1"; else echo "failed: nft table $w$1"; fi
  esac
done
kind= before= hooked= ask=
for w in $(tc qdisc show 2>/dev/null); do
  [ "$before" = qdisc ] && kind=$w
  [ "$before $kind" = "dev clsact" ] && hooked="$hooked $w" && ask="${{ask}}filter show dev $w egress
"
  before=$w
done
case $([ -n "$ask" ] && printf %s "$ask" | tc -batch -) in *"mark 0xfb"*)
  for w in $hooked; do
    said=$(tc filter show dev "$w" egress)
    case $said in
    *"pref {OWN} "*"mark 0xfb"*) way="qdisc del dev $w clsact" ;;
    *"mark 0xfb"*) way="filter del dev $w egress protocol ip prio {GUEST}" ;;
    *) continue ;;
    esac
    if tc $way; then echo "{_MARK} removed a redirection at $w$1"; else echo "failed: redirection of $w$1"; fi
  done
esac
devices=
while read -r w _; do
  case $w in fbvia*) devices="$devices ${{w%%:*}}" ;; esac
done </proc/net/dev
for w in $devices; do
  if ip link del "$w"; then echo "{_MARK} removed $w$1"; else echo "failed: $w$1"; fi
done
case $(ip rule show priority {PRIORITY} 2>/dev/null) in *"lookup {TABLE}"*)
  if ip rule del priority {PRIORITY}; then echo "{_MARK} removed the rule to table {TABLE}$1"
  else echo "failed: rule {PRIORITY}$1"; fi
  ip route flush table {TABLE} 2>/dev/null
esac
case $(ip rule show) in *"proto {PROTOCOL}"*)
  if {{ {SWEEP} }}; then echo "{_MARK} removed the routing scheme$1"; else echo "failed: routing scheme$1"; fi ;;
*)
  # Without its rules it routes nothing, and what is left of it makes the lab differ all the same.
  if [ -n "$(ip -4 route show table all proto {PROTOCOL} 2>/dev/null)" ]; then
    {{ {SWEEP} }}; echo "{_MARK} removed tables of a routing scheme$1"
  fi ;;
esac
true
"""
# What is left of faults that have a unit, a stored revert or a process. Killed, not asked: ExecStopPost of each unit
# then runs its stored revert, and so do we for what has no unit any more. As few processes as can be, as above: with
# five emulated machines on two CPUs each of them is felt.
_FAULTS = f"""\
units=
for f in /run/systemd/transient/faultbed-fault-*; do
  [ -e "$f" ] && units="$units ${{f##*/}}"
done
if [ -n "$units" ]; then
  systemctl kill -s KILL $units 2>/dev/null; systemctl stop $units
  for u in $units; do
    if {{ read -r p <"{_SYSTEM_SLICE}/$u/cgroup.procs"; }} 2>/dev/null; then
      echo "failed: unit $u still has process $p"
    else echo "{_MARK} stopped unit $u"; fi
  done
fi
for f in {REVERT_DIR}/*.revert; do
  [ -e "$f" ] || continue
  if sh "$f"; then rm -f "$f" "${{f%.revert}}.claim"; echo "{_MARK} ran stored revert $f"; else echo "failed: $f"; fi
done
for g in {" ".join(CGROUPS)}; do
  [ -d "$g" ] || continue
  for p in $(cat "$g/cgroup.procs"); do echo "$p" > /sys/fs/cgroup/cgroup.procs; done
  if rmdir "$g"; then echo "{_MARK} removed $g"; else echo "failed: $g"; fi
done
for c in /sys/fs/cgroup/faultbed.slice/*/cpu.max; do
  {{ read -r was <"$c"; }} 2>/dev/null || continue
  [ "$was" = "{UNLIMITED}" ] && continue
  if echo {UNLIMITED} > "$c"; then echo "{_MARK} $c was $was"; else echo "failed: $c is $was"; fi
done
if [ -e {LATE} ]; then
  if rm -f {LATE}; then echo "{_MARK} removed {LATE}"; else echo "failed: {LATE}"; fi
fi
for f in /proc/[0-9]*/stat; do
  {{ read -r p name state _ <"$f"; }} 2>/dev/null || continue
  case "$name $state" in
  "({HOG}) "*) kill -KILL $p && echo "{_MARK} ended busy process $p" ;;
  "(bgpd) T"|"(zebra) T"|"(python3"*") T")
    if %s; then kill -CONT $p && echo "{_MARK} process $p $name goes on"
    else echo "{_FOREIGN} process $p $name is stopped; left as it is"; fi ;;
  esac
done
"""
_NAMESPACES = f"""\
sweep={shlex.quote(_SWEEP)}
sh -c "$sweep"
for n in /run/netns/*; do
  [ -e "$n" ] && nsenter --net="$n" sh -c "$sweep" sweep " in ${{n##*/}}"
done
"""
# A soft machine runs nobody else's programs; on a rack those that are ours have a module of ours as an argument.
_OURS = {
    "soft": "true",
    "rack": "tr '\\0' '\\n' < /proc/$p/cmdline | grep -qxE '(traffic|inject|testbed)([.][a-z_]+)+'",
}


def heal(lab: Lab, *, only: Collection[str] = (), panic: bool = False, timeout_s: float = 60.0) -> list[str]:
    """Revert every leftover in a lab. Works beside a running controller: its faults end.

    Args:
        lab: the lab.
        only: machines; without, all of them.
        panic: only units, stored reverts, limits and processes, which is quick and all that a fault of ours has before
            its target has reverted it; namespaces are not searched for marks, ports and carriers are not looked at.
        timeout_s: how long one machine may take.

    Returns:
        What was done, one line each, and what looks like a fault and is not known to be ours (`is_foreign`); empty when
        there was nothing.

    Raises:
        RevertFailed: something is left, or a machine does not answer and may still hold a fault; the others are done.
    """
    # First: whoever reads it later begins no fault, and what has been begun is found below.
    interventions.record(lab.state_dir, "heal --panic" if panic else "heal", covered(lab.topology, only))
    machines = tuple(name for name in lab.nodes() if not only or name in only)

    def one(machine: str) -> list[str]:
        text = _faults(lab) if panic else script(lab, machine)
        try:
            ran = lab.node(machine).run(["sh", "-c", text], check=False, timeout_s=timeout_s)
        except LabError as error:
            return [f"{machine}: failed: {error}"]
        return [f"{machine}: {line}" for line in ran.stdout.splitlines()]

    with ThreadPoolExecutor(max_workers=len(machines) + 1) as pool:
        here = pool.submit(_tried, lambda: _local(lab, most_s=_REVERT_S if panic else None))
        if not panic:
            wait([here])  # a host that boots answers once the revert beside QEMU has run, and one that stands still
        parts = list(pool.map(one, machines))
        lines = [*here.result(), *(line for part in parts for line in part)]
    if not panic:
        lines += _tried(lambda: _provisioned(lab, lines))
    failed = [line for line in lines if ": failed: " in line]
    if not panic and not failed:
        lines += _tried(lambda: _carriers(lab))
        failed = [line for line in lines if ": failed: " in line]
    if failed:
        raise RevertFailed(f"{'; '.join(failed)}; a `faultbed reset` brings the lab back as a whole")
    told = [line for line in lines if f": {_MARK}" in line or f": {_FOREIGN}" in line]
    return [line.replace(f"{_MARK} ", "", 1) for line in told]


def is_foreign(line: str) -> bool:
    """Whether a line of `heal` tells of something that was left as it is."""
    return f": {_FOREIGN}" in line


def _faults(lab: Lab) -> str:
    return _FAULTS.replace("%s", _OURS[lab.kind])


def script(lab: Lab, machine: str) -> str:
    """The shell that heals one machine."""
    lines = [_faults(lab), _NAMESPACES, *_made(lab, machine)]
    before = dirty.baseline(lab.state_dir) if lab.kind == "rack" else None
    for link in lab.topology.links:
        for port in (link.a, link.b):
            if lab.carrier(port.node).name != machine:
                continue
            netns = lab.netns(port.node)
            at, name = f"-n {shlex.quote(netns)} " if netns else "", f"{port.node}:{port.netdev}"
            is_up = f'[ -n "$(ip {at}link show dev {port.netdev} up 2>/dev/null)" ]'
            if lab.kind == "soft" or _was_up(before, port):
                lines.append(
                    f"{is_up} || {{ ip {at}link set dev {port.netdev} up && echo '{_MARK} brought up {name}' || "
                    f"echo 'failed: {name} is down'; }}"
                )
            else:
                lines.append(f"{is_up} || echo '{_FOREIGN} {name} is down; left as it is'")
    return "\n".join([*lines, "true"])


def _made(lab: Lab, machine: str) -> list[str]:
    """Shell that ends, telling so, on a machine that lacks what provisioning makes and every boot forgets."""
    if lab.kind != "soft":
        return []
    needs = [f"/run/netns/{netns}" for name, netns in _switches(lab) if lab.carrier(name).name == machine]
    if machine in lab.topology.host_by_name:
        needs += [f"/sys/class/infiniband/{rnic.name}" for rnic in lab.topology.host_by_name[machine].rnics]
    if not needs:
        return []
    return [f'for x in {shlex.join(needs)}; do [ -e "$x" ] || {{ echo "{_UNMADE} $x"; exit 0; }}; done']


def _switches(lab: Lab) -> list[tuple[str, str]]:
    """Switches that are namespaces, each with its own."""
    named = ((switch.name, lab.netns(switch.name)) for switch in lab.topology.switches)
    return [(name, netns) for name, netns in named if netns]


def _was_up(before: Fingerprint | None, port: Port) -> bool:
    """Whether a port was up when the run began that left the lab DIRTY; nobody knows of a lab that is not."""
    said = before.nodes.get(port.node, {}).get(f"link {port.netdev}", "") if before else ""
    return "UP" in said.split()


def _tried(what: Callable[[], list[str]]) -> list[str]:
    try:
        return what()
    except (LabError, RevertFailed, OSError, subprocess.SubprocessError) as error:
        return [f"here: failed: {error}"]


def _local(lab: Lab, *, most_s: float | None) -> list[str]:
    """End the holders on this machine and run their stored reverts, all at once; none may take longer than `most_s`.

    A holder would go on with its next edge, and its guardian runs the same stored revert: the holder is killed first,
    and whoever has the lock of its claim reverts.
    """
    folder = revert_dir(lab)
    # First: a holder that has not claimed yet, which we cannot see, reads this once it has.
    with contextlib.suppress(OSError):
        healed_file(lab).write_text(secrets.token_hex(8), encoding="ascii")
    names = {path.stem for what in ("revert", "claim") for path in folder.glob(f"*.{what}")}
    with ThreadPoolExecutor(max_workers=max(1, len(names))) as pool:
        lines = pool.map(lambda name: _healed_here(folder / f"{name}.revert", most_s), sorted(names))
        return [line for part in lines for line in part]


def _healed_here(stored: Path, most_s: float | None) -> list[str]:
    """End one local holder and run its stored revert, unless that has been done meanwhile."""
    claim, lines = Path(claim_file(str(stored))), []
    said = read_claim(str(claim))
    try:
        if end_holder(str(claim)):
            what = f"{said.get('kind')} on {said.get('target')}" if said else stored.stem
            lines = [f"here: {_MARK} ended the holder of {what}"]
        patience_s = most_s or (_BACK_S if stored.exists() and REJOIN in stored.read_text() else _REVERT_S)
        with locked(str(claim), within_s=patience_s):
            if stored.exists():
                ran = subprocess.run(["/bin/sh", str(stored)], check=False, capture_output=True, timeout=patience_s)
                if ran.returncode:
                    return [*lines, f"here: failed: {stored}: {ran.stderr.decode(errors='replace').strip()}"]
                stored.unlink(missing_ok=True)
                lines.append(f"here: {_MARK} ran stored revert {stored.name}")
            claim.unlink(missing_ok=True)
    except (OSError, subprocess.SubprocessError) as error:
        # Gone meanwhile: the guardian has reverted.
        return [*lines, f"here: failed: {error}"] if stored.exists() or claim.exists() else lines
    return lines


def _provisioned(lab: Lab, lines: list[str]) -> list[str]:
    """Machines of a soft lab that have told of things that provisioning makes and that are not there: after a boot."""
    bare = sorted({line.partition(":")[0] for line in lines if f": {_UNMADE}" in line})
    if bare:
        reprovision.provision_machines(lab, bare)
    return [f"{machine}: {_MARK} provisioned it again: it has booted" for machine in bare]


def _carriers(lab: Lab) -> list[str]:
    """Links of VMs that QEMU holds down."""
    if lab.kind != "soft":
        return []
    done = []
    seen = counters.read(lab, [host.name for host in lab.topology.hosts])
    for host in lab.topology.hosts:
        for netdev in (host.front_end_netdev, *(rnic.netdev for rnic in host.rnics)):
            if seen[host.name].get(f"{netdev}.carrier") == 0:
                set_link(str(lab.qmp_socket(host.name)), lab.nic_id(host.name, netdev), up=True)
                done.append(f"{host.name}: {_MARK} gave {netdev} its carrier back")
    return done
