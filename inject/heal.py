"""Find and revert what faults left behind, without a journal and whichever session left it.

`heal` recognises marks. A fault that its target has not reverted has at least a unit or a stored revert. The marks are:

- units named `faultbed-fault-*`, and stored reverts;
- nftables tables named `faultbed_*`, devices named `fbvia*` and the redirections to them;
- a rule to the steering table, and rules and tables of routing schemes;
- a file that makes receives late, and synthetic health of a soft GPU;
- busy and stopped processes, and a CPU limit on a soft GPU, on ranks or on storage;
- ports of the topology that are down, and links of VMs without carrier.

On a rack a port may be down for maintenance and a process may be stopped for debugging. There only ports that were up
before the run that left the lab DIRTY are brought up, and only faultbed's own programs are continued. All others are
reported as not ours and left alone.

Each machine runs one command, all machines at once; one that does not answer does not delay the others. A change
without a mark (a setting, a line of a configuration, a killed daemon) does not survive a reboot, and neither does its
stored revert. A machine of a soft lab that has rebooted lacks what provisioning makes: it is provisioned again.
"""

from __future__ import annotations

import contextlib
import secrets
import shlex
import subprocess
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from faultbed.inject import reprovision
from faultbed.inject.leases.channels import REPROVISION, healed_file, revert_dir
from faultbed.inject.node.holder import REVERT_DIR
from faultbed.inject.node.machine.cgroup import UNLIMITED
from faultbed.inject.node.machine.hog import NAME as HOG
from faultbed.inject.node.machine.limit import CGROUPS
from faultbed.inject.node.machine.vmreset import REPROVISION_DEADLINE_S
from faultbed.inject.node.network.detour import OWN_CLSACT_PRIO, SHARED_CLSACT_PRIO
from faultbed.inject.node.network.latereceives import FILE as LATE
from faultbed.inject.node.network.scheme import LEFTOVERS, SWEEP
from faultbed.inject.node.network.steer import PRIORITY, TABLE
from faultbed.inject.node.qmp import set_link
from faultbed.testbed.errors import CommandFailed, LabError, RevertFailed
from faultbed.testbed.model.lab_kind import traits_of
from faultbed.testbed.model.topology import Port
from faultbed.testbed.node.gpu.health import FOLDER as HEALTH
from faultbed.testbed.node.holders import claim_file, end_holder, locked, read_claim
from faultbed.testbed.observe import counters
from faultbed.testbed.observe.fingerprint import Fingerprint
from faultbed.testbed.side_by_side import in_background, on_each, result_of
from faultbed.testbed.stopping import Deadline
from faultbed.testbed.tenancy import dirty, interventions
from faultbed.testbed.tenancy.reservation import covered

if TYPE_CHECKING:
    from faultbed.testbed.lab import Lab

__all__ = ["PANIC_S", "heal", "is_foreign", "script"]

PANIC_S = 5.0
"""How long `panic` should take. It is not cut off there: an emulated switch that was idle may need more."""
_REVERT_S = 30.0
"""Deadline of a revert beside QEMU, unless it waits for a host to boot (`REPROVISION_DEADLINE_S`)."""
_MISSING = "missing:"
# Where systemd keeps the control groups of transient units (systemd.slice(5)).
_SYSTEM_SLICE = "/sys/fs/cgroup/system.slice"
_MARK = "healed:"
_FOREIGN = "not ours:"

# Removes what faults leave in one network namespace; `$1` names it in messages. A process costs a tenth of a second
# under emulation, so that the shell itself matches words.
_SWEEP = f"""\
for w in $(nft list tables netdev 2>/dev/null); do
  case $w in faultbed_*)
    if nft delete table netdev "$w"; then echo "{_MARK} removed nft table $w$1"
    else echo "failed: nft table $w$1 is left"; fi
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
    filters=$(tc filter show dev "$w" egress)
    case $filters in
    *"pref {OWN_CLSACT_PRIO} "*"mark 0xfb"*) delete="qdisc del dev $w clsact" ;;
    *"mark 0xfb"*) delete="filter del dev $w egress protocol ip prio {SHARED_CLSACT_PRIO}" ;;
    *) continue ;;
    esac
    if tc $delete; then echo "{_MARK} removed a redirection at $w$1"
    else echo "failed: a redirection at $w$1 is left"; fi
  done
esac
devices=
while read -r w _; do
  case $w in fbvia*) devices="$devices ${{w%%:*}}" ;; esac
done </proc/net/dev
for w in $devices; do
  if ip link del "$w"; then echo "{_MARK} removed $w$1"; else echo "failed: device $w$1 is left"; fi
done
case $(ip rule show priority {PRIORITY} 2>/dev/null) in *"lookup {TABLE}"*)
  if ip rule del priority {PRIORITY}; then echo "{_MARK} removed the rule to table {TABLE}$1"
  else echo "failed: the rule of priority {PRIORITY}$1 is left"; fi
  ip route flush table {TABLE} 2>/dev/null
esac
if [ -n "{LEFTOVERS}" ]; then
  if {{ {SWEEP} }}; then echo "{_MARK} removed the routing scheme$1"
  else echo "failed: a part of the routing scheme$1 is left"; fi
fi
true
"""
# Ends faults that have a unit, a stored revert or a process. Units are killed with SIGKILL: ExecStopPost of each unit
# then runs its stored revert; stored reverts without a unit run here. It starts as few processes as possible: with
# five emulated machines on two CPUs, each one costs noticeable time.
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
  if sh "$f"; then rm -f "$f" "${{f%.revert}}.claim"; echo "{_MARK} ran stored revert $f"
  else echo "failed: stored revert $f"; fi
done
for g in {" ".join(CGROUPS)}; do
  [ -d "$g" ] || continue
  for p in $(cat "$g/cgroup.procs"); do echo "$p" > /sys/fs/cgroup/cgroup.procs; done
  if rmdir "$g"; then echo "{_MARK} removed $g"; else echo "failed: cgroup $g is left"; fi
done
for c in /sys/fs/cgroup/faultbed.slice/*/cpu.max; do
  {{ read -r was <"$c"; }} 2>/dev/null || continue
  [ "$was" = "{UNLIMITED}" ] && continue
  if echo {UNLIMITED} > "$c"; then echo "{_MARK} $c was $was"; else echo "failed: $c is still $was"; fi
done
for f in {HEALTH}/*.now; do
  [ -e "$f" ] || continue
  if rm -f "$f"; then echo "{_MARK} removed $f"; else echo "failed: $f is left"; fi
done
if [ -e {LATE} ]; then
  if rm -f {LATE}; then echo "{_MARK} removed {LATE}"; else echo "failed: {LATE} is left"; fi
fi
for f in /proc/[0-9]*/stat; do
  {{ read -r p name state _ <"$f"; }} 2>/dev/null || continue
  case "$name $state" in
  "({HOG}) "*) kill -KILL $p && echo "{_MARK} ended busy process $p" ;;
  "(bgpd) T"|"(zebra) T"|"(python3"*") T")
    if %s; then kill -CONT $p && echo "{_MARK} process $p $name continues"
    else echo "{_FOREIGN} process $p $name is stopped; left as it is"; fi ;;
  esac
done
"""
# Namespaces of other programs may be gone although their files are there; those of the lab's switches may not.
_NAMESPACES = f"""\
sweep={shlex.quote(_SWEEP)}
sh -c "$sweep"
for n in /run/netns/*; do
  [ -e "$n" ] || continue
  nsenter --net="$n" sh -c "$sweep" sweep " in ${{n##*/}}" && continue
  case " $switches " in *" ${{n##*/}} "*) echo "failed: namespace ${{n##*/}} could not be entered" ;; esac
done
"""
_IS_OURS = "tr '\\0' '\\n' < /proc/$p/cmdline | grep -qxE 'faultbed[.](traffic|inject|testbed)([.][a-z_]+)+'"
"""Shell command that succeeds if process $p is ours: it has one of our modules as an argument."""


def heal(lab: Lab, *, only: Collection[str] = (), panic: bool = False, timeout_s: float = 60.0) -> list[str]:
    """Revert every leftover in a lab. A controller that is running meanwhile finds its faults ended.

    Args:
        lab: the lab.
        only: names of machines; default: all of them.
        panic: handle only units, stored reverts, limits and processes. That is quick, and every fault that its target
            has not reverted has one of them. Namespaces, ports and carriers are not checked.
        timeout_s: deadline of one machine.

    Returns:
        One line for each change that was reverted, and for each thing that looks like a fault but is not ours
        (`is_foreign`). Empty if there was nothing.

    Raises:
        RevertFailed: something is left, or a machine does not answer and may still hold a fault. All other machines
            are healed.
    """
    # Written first: a command that reads this record starts no new fault, and faults started before are found below.
    interventions.record(lab.state_dir, "heal --panic" if panic else "heal", covered(lab.topology, only))
    machines = tuple(name for name in lab.nodes() if not only or name in only)

    def heal_machine(machine: str) -> list[str]:
        text = f"{_faults(lab)}true\n" if panic else script(lab, machine)
        try:
            ran = lab.node(machine).run(["sh", "-c", text], check=False, timeout_s=timeout_s)
        except LabError as error:
            return [f"{machine}: failed: {error}"]
        lines = [f"{machine}: {line}" for line in ran.stdout.splitlines()]
        if ran.rc:  # a complete script ends with 0: this one did not
            message = (ran.stderr.strip() or "no message").splitlines()[-1]
            lines.append(f"{machine}: failed: the healing script did not run to its end (status {ran.rc}): {message}")
        return lines

    most_s = _REVERT_S if panic else None
    local_end = Deadline(2 * (most_s or REPROVISION_DEADLINE_S))
    local = in_background(lambda: _lines_of(lambda: _heal_local(lab, most_s=most_s)), "heal: here")
    # A rebooting or frozen host answers only after its revert beside QEMU; in a panic nothing is waited for.
    first = [] if panic else _lines_of(lambda: result_of(local, local_end, "here"))
    try:
        parts = on_each(machines, heal_machine, timeout_s=2 * timeout_s)
    except CommandFailed as error:
        raise RevertFailed(f"{error}; it may still hold a fault: run `faultbed heal` again") from error
    here = _lines_of(lambda: result_of(local, local_end, "here")) if panic else first
    lines = [*here, *(line for part in parts for line in part)]
    if not panic:
        lines += _lines_of(lambda: _provision_again(lab, lines))
    failed = [line for line in lines if ": failed: " in line]
    if not panic and not failed:
        lines += _lines_of(lambda: _restore_carriers(lab))
        failed = [line for line in lines if ": failed: " in line]
    if failed:
        raise RevertFailed(f"{'; '.join(failed)}; run `faultbed reset` to restore the whole lab")
    reported = [line for line in lines if f": {_MARK}" in line or f": {_FOREIGN}" in line]
    return [line.replace(f"{_MARK} ", "", 1) for line in reported]


def is_foreign(line: str) -> bool:
    """Return whether a line of `heal` reports something that is not ours and was left alone."""
    return f": {_FOREIGN}" in line


def _faults(lab: Lab) -> str:
    # A soft machine runs only our programs.
    return _FAULTS.replace("%s", "true" if traits_of(lab.kind).has_snapshot else _IS_OURS)


def script(lab: Lab, machine: str) -> str:
    """Return the shell script that heals one machine."""
    names = [netns for name, netns in _switches(lab) if lab.carrier(name).name == machine]
    lines = [_faults(lab), f"switches={shlex.quote(' '.join(names))}", _NAMESPACES, *_exit_if_missing(lab, machine)]
    has_snapshot = traits_of(lab.kind).has_snapshot
    before = None if has_snapshot else dirty.baseline(lab.state_dir)
    for link in lab.topology.links:
        for port in (link.a, link.b):
            if lab.carrier(port.node).name != machine:
                continue
            netns = lab.netns(port.node)
            at, name = f"-n {shlex.quote(netns)} " if netns else "", f"{port.node}:{port.netdev}"
            is_up = f'[ -n "$(ip {at}link show dev {port.netdev} up 2>/dev/null)" ]'
            if has_snapshot or _was_up(before, port):
                lines.append(
                    f"{is_up} || {{ ip {at}link set dev {port.netdev} up && echo '{_MARK} brought up {name}' || "
                    f"echo 'failed: {name} is down'; }}"
                )
            else:
                lines.append(f"{is_up} || echo '{_FOREIGN} {name} is down; left as it is'")
    return "\n".join([*lines, "true"])


def _exit_if_missing(lab: Lab, machine: str) -> list[str]:
    """Return shell lines that exit on a machine that lacks what provisioning makes, because it has rebooted."""
    if not traits_of(lab.kind).is_emulated:
        return []
    needs = [f"/run/netns/{netns}" for name, netns in _switches(lab) if lab.carrier(name).name == machine]
    if machine in lab.topology.host_by_name:
        needs += [f"/sys/class/infiniband/{rnic.name}" for rnic in lab.topology.host_by_name[machine].rnics]
    if not needs:
        return []
    return [f'for x in {shlex.join(needs)}; do [ -e "$x" ] || {{ echo "{_MISSING} $x"; exit 0; }}; done']


def _switches(lab: Lab) -> list[tuple[str, str]]:
    """Return the switches that are namespaces, as (switch, namespace)."""
    named = ((switch.name, lab.netns(switch.name)) for switch in lab.topology.switches)
    return [(name, netns) for name, netns in named if netns]


def _was_up(before: Fingerprint | None, port: Port) -> bool:
    """Return whether a port was up before the run that left the lab DIRTY; False if there is no such run."""
    link = before.nodes.get(port.node, {}).get(f"link {port.netdev}", "") if before else ""
    return "UP" in link.split()


def _lines_of(action: Callable[[], list[str]]) -> list[str]:
    try:
        return action()
    except (LabError, RevertFailed, OSError, subprocess.SubprocessError) as error:
        return [f"here: failed: {error}"]


def _heal_local(lab: Lab, *, most_s: float | None) -> list[str]:
    """End the holders on this machine and run their stored reverts, all at once.

    Each holder is killed first, because it would otherwise make its next edge. Its guardian then runs the same stored
    revert as this process: only the one that holds the lock of the claim runs it.

    Args:
        lab: the lab.
        most_s: deadline of each revert; None: as long as this kind of revert may take.
    """
    folder = revert_dir(lab)
    # First: a holder that has no claim yet cannot be found here, but reads this file once it has one.
    with contextlib.suppress(OSError):
        healed_file(lab).write_text(secrets.token_hex(8), encoding="ascii")
    names = {path.stem for suffix in ("revert", "claim") for path in folder.glob(f"*.{suffix}")}
    longest_s = 2 * (most_s or REPROVISION_DEADLINE_S)  # one deadline for its lock, one for its revert
    lines = on_each(
        sorted(names), lambda name: _heal_local_holder(folder / f"{name}.revert", most_s), timeout_s=longest_s
    )
    return [line for part in lines for line in part]


def _heal_local_holder(stored: Path, most_s: float | None) -> list[str]:
    """End one local holder and run its stored revert, unless its guardian has done so meanwhile."""
    claim, lines = Path(claim_file(str(stored))), []
    fields = read_claim(str(claim))
    try:
        if end_holder(str(claim)):
            fault_text = f"{fields.get('kind')} on {fields.get('target')}" if fields else stored.stem
            lines = [f"here: {_MARK} ended the holder of {fault_text}"]
        patience_s = most_s or (REPROVISION_DEADLINE_S if _waits_for_boot(stored) else _REVERT_S)
        with locked(str(claim), within_s=patience_s):
            if stored.exists():
                ran = subprocess.run(["/bin/sh", str(stored)], check=False, capture_output=True, timeout=patience_s)
                if ran.returncode:
                    return [*lines, f"here: failed: {stored}: {ran.stderr.decode(errors='replace').strip()}"]
                stored.unlink(missing_ok=True)
                lines.append(f"here: {_MARK} ran stored revert {stored.name}")
            claim.unlink(missing_ok=True)
    except (OSError, subprocess.SubprocessError) as error:
        # If both are gone, the guardian has reverted.
        return [*lines, f"here: failed: {error}"] if stored.exists() or claim.exists() else lines
    return lines


def _waits_for_boot(stored: Path) -> bool:
    return stored.exists() and REPROVISION in stored.read_text()


def _provision_again(lab: Lab, lines: list[str]) -> list[str]:
    """Provision machines of a soft lab again that reported missing parts, which a reboot removes."""
    bare = sorted({line.partition(":")[0] for line in lines if f": {_MISSING}" in line})
    if bare:
        reprovision.provision_machines(lab, bare)
    return [f"{machine}: {_MARK} provisioned again after a reboot" for machine in bare]


def _restore_carriers(lab: Lab) -> list[str]:
    """Bring up links of VMs that QEMU holds down."""
    if not traits_of(lab.kind).is_emulated:
        return []
    done = []
    readings = counters.read(lab, [host.name for host in lab.topology.hosts])
    for host in lab.topology.hosts:
        for netdev in (host.front_end_netdev, *(rnic.netdev for rnic in host.rnics)):
            if readings[host.name].get(f"{netdev}.carrier") == 0:
                set_link(str(lab.qmp_socket(host.name)), lab.nic_id(host.name, netdev), up=True)
                done.append(f"{host.name}: {_MARK} restored the carrier of {netdev}")
    return done
