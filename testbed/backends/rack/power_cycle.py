"""Plan the power cycle of a host by its BMC, the last resort for a host that does not come back. Pure.

The commands are planned only if the lab's owner allows it (`faultbed_safety.power_cycle: after-heal`) and heal failed:
the lab is marked DIRTY. `power_cycled` runs them, if the user confirms. Credentials are never on a command line and
never in an inventory: curl reads a netrc file, ipmitool the environment. Redfish: DSP2046, ComputerSystem.Reset; IPMI:
ipmitool(1). Not yet run on hardware.

The commands query the BMC for the name of its system, such as 1, System.Embedded.1 (Dell) or DGX (NVIDIA, whose BMC
also lists HGX_Baseboard_0, the GPUs' board). `ForceRestart` is a reset that leaves the power on: it is used only if the
BMC offers no `PowerCycle`.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from fnmatch import fnmatchcase

from faultbed.testbed.errors import Unsupported, UsageError
from faultbed.testbed.inventory.lab_inventory import Inventory
from faultbed.testbed.inventory.schema import BmcVars

__all__ = ["PowerCycle", "plan"]

_SYSTEMS = "/redfish/v1/Systems"
_JSON = (
    "import json,sys; t=sys.stdin.read().strip(); t or sys.exit(1); "
    't[0]=="{" or sys.exit("the BMC did not answer in JSON: "+t[:80]); '
)
"""Python: read an answer. Without one, as after a wrong password, curl has said why."""
_ONLY_SYSTEM = _JSON + (
    'm=[x["@odata.id"] for x in json.loads(t)["Members"]]; '
    'm=[x for x in m if not x.rpartition("/")[2].startswith("HGX_")]; '
    'print(m[0]) if len(m)==1 else sys.exit(f"{len(m)} systems, {m}: name one in faultbed_bmc.system")'
)
"""Python, for the shell: the path of the only host in a ComputerSystemCollection."""
_RESET = _JSON + (
    'a=json.loads(t)["Actions"]["#ComputerSystem.Reset"]; '
    'o=a.get("ResetType@Redfish.AllowableValues") or ["ForceRestart"]; '
    'f=[w for w in ("PowerCycle","ForceRestart") if w in o]; '
    'print(f[0],a["target"]) if f else sys.exit(f"it offers {o}: neither PowerCycle nor ForceRestart")'
)
"""Python, for the shell: the kind of reset that a ComputerSystem offers, and the URL for it."""
_CURL = "curl --fail --silent --show-error --netrc-file ~/.config/faultbed/bmc.netrc"
_IPMI = "ipmitool -I lanplus -E"


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerCycle:
    """The commands in order: state, cycle, state. A cycle cannot be reverted."""

    host: str
    bmc: str
    commands: tuple[str, ...]


def plan(inventory: Inventory, host: str, *, dirty: bool) -> PowerCycle:
    """Return the commands that power-cycle a host.

    Raises:
        UsageError: there is no such host.
        Unsupported: the policy does not allow it, heal has not failed, or the host has no BMC in the inventory.
    """
    if host not in inventory.topology.host_by_name:
        raise UsageError(
            f'no host "{host}" in {inventory.name}; choose one of {", ".join(inventory.topology.host_by_name)}'
        )
    if inventory.safety is None or inventory.safety.power_cycle == "never":
        raise Unsupported(
            f"{host}: {inventory.name} allows no power cycle; its owner can set faultbed_safety.power_cycle: after-heal"
        )
    if not any(fnmatchcase(host, pattern) for pattern in inventory.safety.may_disrupt):
        raise Unsupported(
            f"{host}: {inventory.name} does not allow it to be disrupted; faultbed_safety.may_disrupt allows "
            f"{', '.join(inventory.safety.may_disrupt) or 'nothing'}"
        )
    if not dirty:
        raise Unsupported(
            f"{host}: {inventory.name} is not DIRTY, and a power cycle is only for what `faultbed heal` cannot revert; "
            "run `faultbed heal` first"
        )
    bmc = inventory.bmcs.get(host)
    if bmc is None:
        raise Unsupported(f"{host}: the inventory has no faultbed_bmc for it; add it")
    if bmc.protocol == "ipmi":
        at = f"{_IPMI} -H {shlex.quote(bmc.address)} -U faultbed"
        commands: tuple[str, ...] = (
            f"{at} chassis power status",
            f"{at} chassis power cycle",
            f"{at} chassis power status",
        )
    else:
        commands = _redfish(bmc)
    return PowerCycle(host=host, bmc=bmc.address, commands=commands)


def _redfish(bmc: BmcVars) -> tuple[str, ...]:
    """Return lines for one shell: the system, its resets and state, the cycle, its state again."""
    curl = f"{_CURL} --cacert {shlex.quote(bmc.cacert)}" if bmc.cacert else _CURL
    at = f"https://{bmc.address}"
    system = (
        f"system={shlex.quote(f'{_SYSTEMS}/{bmc.system}')}"
        if bmc.system
        else f"system=$({curl} {shlex.quote(at + _SYSTEMS)} | python3 -c {shlex.quote(_ONLY_SYSTEM)})"
    )
    body = r'"{\"ResetType\": \"${reset%% *}\"}"'
    get_system = f'{curl} {shlex.quote(at)}"${{system:?}}"'
    return (
        system,
        get_system,
        f"reset=$({get_system} | python3 -c {shlex.quote(_RESET)})",
        f"{curl} -H 'Content-Type: application/json' -X POST -d {body} {shlex.quote(at)}\"${{reset##* }}\"",
        get_system,
    )
