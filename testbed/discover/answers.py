"""The shell program by which discovery queries a machine, and its output in sections.

The program is the same for every machine: it runs each tool that may exist, in the machine's own network namespace and
in every named one (each soft switch has one), and changes nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from faultbed.testbed.errors import LabError

__all__ = ["SCRIPT", "Answers", "learning_trigger", "split"]

_MARK = "@@"
_SPACE = f"""\
echo {_MARK}ip; printf "addr show\\nroute show table all\\nneigh show\\n" | ip -d -j -force -batch -
echo {_MARK}fdb; bridge -j fdb show
echo {_MARK}seed; cat /proc/sys/net/ipv4/fib_multipath_hash_seed
echo {_MARK}bgp; vtysh ${{SPACE:+-N $SPACE}} -d bgpd -c "show bgp ipv4 unicast summary json"
echo {_MARK}sessions; vtysh ${{SPACE:+-N $SPACE}} -d bgpd -c "show bgp neighbors json"
"""
_MACHINE = f"""\
echo {_MARK}ssh; echo ${{SSH_CONNECTION:-$(tr "\\0" "\\n" </proc/$PPID/environ | sed -n s/^SSH_CONNECTION=//p)}}
echo {_MARK}hostname; uname -n
echo {_MARK}os; . /etc/os-release; echo $ID; [ -d /etc/sonic ] && echo sonic
echo {_MARK}rdma; rdma -j link show
echo {_MARK}device
for d in /sys/class/infiniband/*; do [ -e $d/device ] && echo ${{d##*/}} $(readlink -f $d/device); done
echo {_MARK}speed; grep -s . /sys/class/net/*/speed
echo {_MARK}gpu; nvidia-smi --query-gpu=index,name,pci.bus_id --format=csv,noheader
echo {_MARK}pci; readlink -f /sys/bus/pci/devices/*
echo {_MARK}softgpu; ls -d /sys/fs/cgroup/faultbed.slice/faultbed-gpu*.service
echo {_MARK}ports; sonic-cfggen -d --var-json PORT
echo {_MARK}memory; grep "System RAM" /proc/iomem
echo {_MARK}cpus; nproc
echo {_MARK}lldp; lldpctl -f json || docker exec lldp lldpctl -f json
echo {_MARK}bmc; ipmitool lan print
"""
SCRIPT = f"""\
exec 2>/dev/null
look={shlex.quote(_SPACE)}
SPACE= sh -c "$look"
{_MACHINE}
for f in /run/netns/*; do
  [ -e "$f" ] || continue
  n=${{f##*/}}
  echo {_MARK}namespace $n
  SPACE=$n ip netns exec $n sh -c "$look"
done
echo {_MARK}end
"""
"""POSIX shell script that prints everything; a tool that is not installed prints nothing.

The script runs as root by sudo, which removes SSH_CONNECTION from the environment (sudoers(5), env_reset). It is
therefore read from the environment of sudo itself, the script's parent.
"""

_SEND_BROADCASTS = """\
import socket, sys
for pair in sys.argv[1:]:
    address, broadcast = pair.split(",")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        sender.bind((address, 0))
        sender.sendto(b"", (broadcast, 9))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The answer of one machine: sections of its own namespace, and those of each named one, by name."""

    own: Mapping[str, str]
    namespaces: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def split(machine: str, text: str, *, stderr: str = "") -> Answers:
    """Split the output of `SCRIPT` on a machine into its sections. `stderr` is its stderr, for the error message.

    Raises:
        LabError: the output is incomplete.
    """
    namespaces: dict[str, dict[str, str]] = {"": {}}
    namespace, section, body = "", "", list[str]()
    for line in text.splitlines():
        if not line.startswith(_MARK):
            body.append(line)
            continue
        if section:
            namespaces[namespace][section] = "\n".join(body)
        section, _, name = line[len(_MARK) :].partition(" ")
        body = []
        if section == "namespace":
            namespace, section = name, ""
            namespaces[namespace] = {}
    if section != "end":
        note = f"; its stderr: {stderr.strip()[-200:]}" if stderr.strip() else ""
        raise LabError(f"{machine}: the answer to discovery ends in its section {section!r}: {text[-200:]!r}{note}")
    return Answers(own=namespaces.pop(""), namespaces=namespaces)


def learning_trigger(pairs: list[tuple[str, str]]) -> list[str]:
    """Return a command that sends an empty datagram (port 9, discard) from each address to its broadcast address.

    The bridge learns from the frame at which port the host is. Without one, its table has no entry for the host.
    """
    return ["python3", "-c", _SEND_BROADCASTS, *(f"{address},{broadcast}" for address, broadcast in pairs)]
