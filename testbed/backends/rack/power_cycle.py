"""The last resort for a host that does not come back: a power cycle by its BMC, as a plan of commands. Pure.

Only ever planned here, and only where the lab's owner has said so (`faultbed_safety.power_cycle: after-heal`) and heal
could not: the lab is marked DIRTY. Credentials are never on a command line and never in an inventory: curl reads a
netrc file, ipmitool the environment. Redfish: DSP2046, ComputerSystem.Reset; IPMI: ipmitool(1). Not yet run on
hardware.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from fnmatch import fnmatchcase

from testbed.errors import Unsupported, UsageError
from testbed.inventory.lab_inventory import Inventory

__all__ = ["PowerCycle", "plan"]

_SYSTEM = "redfish/v1/Systems/1"
_CURL = "curl --fail --silent --show-error --netrc-file ~/.config/faultbed/bmc.netrc"
_IPMI = "ipmitool -I lanplus -E"


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerCycle:
    """What would be run, in order: a look, the cycle, a look. A cycle cannot be reverted."""

    host: str
    bmc: str
    commands: tuple[str, ...]


def plan(inventory: Inventory, host: str, *, dirty: bool) -> PowerCycle:
    """The commands that power-cycle a host.

    Raises:
        UsageError: there is no such host.
        Unsupported: the policy does not allow it, heal has not failed, or the host has no BMC in the inventory.
    """
    if host not in inventory.topology.host_by_name:
        raise UsageError(f'no host "{host}" in {inventory.name}: it has {", ".join(inventory.topology.host_by_name)}')
    if inventory.safety is None or inventory.safety.power_cycle == "never":
        raise Unsupported(
            f"{host}: {inventory.name} allows no power cycle; its owner can, by faultbed_safety.power_cycle: after-heal"
        )
    if not any(fnmatchcase(host, pattern) for pattern in inventory.safety.may_disrupt):
        raise Unsupported(
            f"{host}: {inventory.name} does not allow it to be disrupted; faultbed_safety.may_disrupt allows "
            f"{', '.join(inventory.safety.may_disrupt) or 'nothing'}"
        )
    if not dirty:
        raise Unsupported(
            f"{host}: {inventory.name} is not DIRTY: a power cycle is only for what heal could not revert"
        )
    bmc = inventory.bmcs.get(host)
    if bmc is None:
        raise Unsupported(f"{host}: the inventory has no faultbed_bmc of it")
    if bmc.protocol == "ipmi":
        at = f"{_IPMI} -H {shlex.quote(bmc.address)} -U faultbed"
        commands = (f"{at} chassis power status", f"{at} chassis power cycle", f"{at} chassis power status")
    else:
        at = shlex.quote(f"https://{bmc.address}/{_SYSTEM}")
        reset_at = shlex.quote(f"https://{bmc.address}/{_SYSTEM}/Actions/ComputerSystem.Reset")
        body = shlex.quote(json.dumps({"ResetType": "ForceRestart"}))
        reset = f"-H 'Content-Type: application/json' -X POST -d {body} {reset_at}"
        commands = (f"{_CURL} {at}", f"{_CURL} {reset}", f"{_CURL} {at}")
    return PowerCycle(host=host, bmc=bmc.address, commands=commands)
