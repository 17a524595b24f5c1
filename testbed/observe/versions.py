"""Versions of what a rack's machines run: firmware of RNICs, GPU driver, RDMA stack, switch system, FRR, kernel.

A run records them, and `report --compare` names those that differ: a comparison of two firmwares needs no other step. A
machine that has no such part prints nothing for it, and a machine that does not answer is recorded with the reason, so
that two runs are never equal in what one of them did not read. Not yet run on hardware.

Sources: Documentation/ABI/stable/sysfs-class-infiniband (fw_ver, board_id), nvidia's module version in sysfs,
dpkg-query(1), rpm(8), sonic-cfggen (sonic_version.yml), vtysh(1).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from faultbed.testbed.errors import LabError
from faultbed.testbed.side_by_side import on_each

if TYPE_CHECKING:
    from faultbed.testbed.lab import Lab

__all__ = ["SCRIPT", "parse", "read"]

SCRIPT = r"""
of() { v=$(cat); [ -n "$v" ] && printf '%s\t%s\n' "$1" "$v"; }
one() { head -n 1 "$1" 2>/dev/null; }
uname -r | of kernel
for d in /sys/class/infiniband/*; do
[ -e "$d/fw_ver" ] && echo "$(one $d/fw_ver) ($(one $d/board_id))" | of "${d##*/} firmware"
done
one /sys/module/mlx5_core/version | of 'mlx5 driver'
one /sys/module/nvidia/version | of 'GPU driver'
ofed_info -s 2>/dev/null | of OFED
{ dpkg-query -W -f '${Version}' rdma-core || rpm -q --qf '%{VERSION}-%{RELEASE}' rdma-core; } 2>/dev/null | of rdma-core
sonic-cfggen -y /etc/sonic/sonic_version.yml -v build_version 2>/dev/null | of SONiC
command -v sonic-cfggen >/dev/null || sed -n 's/^PRETTY_NAME="\(.*\)"$/\1/p' /etc/os-release 2>/dev/null | of system
vtysh -c 'show version' 2>/dev/null | sed -n 's/^FRRouting \([^ ]*\).*/\1/p' | of FRR
true
"""
"""Prints `name TAB version` for each part of a machine; POSIX shell, and no program that takes a second."""
_LINE = re.compile(r"([A-Za-z0-9_. -]{1,60})\t(.{1,120})")
_TIMEOUT_S = 30.0


def parse(text: str) -> dict[str, str]:
    """Return the versions in the output of `SCRIPT`, by name; other lines are left out."""
    return {match[1]: match[2].strip() for line in text.splitlines() if (match := _LINE.fullmatch(line))}


def read(lab: Lab) -> dict[str, str]:
    """Return the versions of all machines of a lab, by machine and part, such as `host1 mlx5_0 firmware`."""

    def of_machine(machine: str) -> Mapping[str, str]:
        try:
            answer = lab.node(machine).run(["sh", "-c", SCRIPT], timeout_s=_TIMEOUT_S)
        except LabError as error:
            return {"versions": f"not read: {error}"}
        return parse(answer.stdout) or {"versions": "not read: the machine prints none"}

    machines = tuple(lab.inventory_model.management)
    try:
        answers = on_each(machines, of_machine, timeout_s=2 * _TIMEOUT_S)
    except LabError as error:
        return {"versions": f"not read: {error}"}
    return {
        f"{machine} {part}": version
        for machine, answer in zip(machines, answers, strict=True)
        for part, version in answer.items()
    }
