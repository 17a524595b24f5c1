"""Finds and reverts what faults left behind, without a journal and without knowing who left it.

It goes by marks: units named `faultbed-fault-*`, stored reverts, nftables tables named `faultbed_*`, a CPU limit on a
soft GPU, ports of the topology that are down, links of VMs without carrier. One command a machine, all machines at
once.
"""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from inject.channels import revert_dir
from inject.node.cgroup import UNLIMITED
from inject.node.holder import REVERT_DIR
from inject.node.qmp import set_link
from testbed import counters
from testbed.errors import RevertFailed

if TYPE_CHECKING:
    from testbed.lab import Lab

__all__ = ["heal", "script"]

_MARK = "healed:"

_SCRIPT = f"""\
for u in $(systemctl list-units --all --plain --no-legend 'faultbed-fault-*' | cut -d' ' -f1); do
  systemctl kill -s KILL "$u" 2>/dev/null; systemctl stop "$u"; echo "{_MARK} stopped unit $u"
done
for f in {REVERT_DIR}/*.revert; do
  [ -e "$f" ] || continue
  if sh "$f"; then rm -f "$f"; echo "{_MARK} ran stored revert $f"; else echo "failed: $f"; fi
done
for n in '' $(ls /run/netns 2>/dev/null); do
  in=${{n:+ip netns exec $n}}
  for t in $($in nft list tables netdev 2>/dev/null | sed -n 's/^table netdev \\(faultbed_[^ ]*\\).*/\\1/p'); do
    if $in nft delete table netdev "$t"; then echo "{_MARK} removed nft table $t ${{n:+in $n}}"
    else echo "failed: nft table $t"; fi
  done
done
for c in /sys/fs/cgroup/faultbed.slice/*/cpu.max; do
  [ -e "$c" ] || continue
  was=$(cat "$c"); [ "$was" = "{UNLIMITED}" ] && continue
  if echo {UNLIMITED} > "$c"; then echo "{_MARK} $c was $was"; else echo "failed: $c is $was"; fi
done
"""


def heal(lab: Lab, *, timeout_s: float = 30.0) -> list[str]:
    """Revert every leftover in a lab.

    Returns:
        What was done, one line each; empty when there was nothing.

    Raises:
        Unreachable: a machine does not answer: it may still hold a fault.
        RevertFailed: something is left; the message says what.
    """
    done = _local(lab)
    machines = tuple(lab.nodes())

    def one(machine: str) -> list[str]:
        ran = lab.node(machine).run(["sh", "-c", script(lab, machine)], check=False, timeout_s=timeout_s)
        return [f"{machine}: {line}" for line in ran.stdout.splitlines()]

    with ThreadPoolExecutor(max_workers=max(1, len(machines))) as pool:
        lines = [line for part in pool.map(one, machines) for line in part]
    done += [line.replace(f"{_MARK} ", "", 1) for line in lines if f": {_MARK}" in line]
    done += _carriers(lab)
    failed = [line for line in lines if ": failed: " in line]
    if failed:
        raise RevertFailed(f"{'; '.join(failed)}; a `faultbed reset` brings the lab back as a whole")
    return done


def script(lab: Lab, machine: str) -> str:
    """The shell that heals one machine."""
    lines = [_SCRIPT]
    for link in lab.topology.links:
        for port in (link.a, link.b):
            if lab.carrier(port.node).name != machine:
                continue
            netns = lab.netns(port.node)
            at = f"-n {netns} " if netns else ""
            lines.append(
                f'[ -n "$(ip {at}link show dev {port.netdev} up 2>/dev/null)" ] || '
                f"{{ ip {at}link set dev {port.netdev} up && echo '{_MARK} brought up {port.node}:{port.netdev}' || "
                f"echo 'failed: {port.node}:{port.netdev} is down'; }}"
            )
    return "\n".join([*lines, "true"])


def _local(lab: Lab) -> list[str]:
    """Stored reverts of holders that ran on this machine."""
    done, folder = [], revert_dir(lab)
    for path in sorted(folder.glob("*.revert")) if folder.is_dir() else ():
        ran = subprocess.run(["/bin/sh", str(path)], check=False, capture_output=True, timeout=30)
        if ran.returncode:
            raise RevertFailed(f"{path} failed: {ran.stderr.decode(errors='replace').strip()}")
        path.unlink(missing_ok=True)
        done.append(f"here: ran stored revert {path.name}")
    return done


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
                done.append(f"{host.name}: gave {netdev} its carrier back")
    return done
