"""Put back what the roles of rack labs found: tools' settings, sysctls, and files that were there or were not.

The last role's first: what put an RNIC's settings back (mlnx_qos, ethtool) may be in packages that an earlier role
installed. A role that cannot be put back whole holds up no other one.
"""

import os

from faultbed_saved import FOLDER, SavedState
from faultbed_state import StateError, answer

ORDER = (
    "frr_switch",
    "sonic_switch",
    "storage_target",
    "rnic_host",
    "gpu_host",
    "gpudirect_host",
    "time_host",
    "split_host",
    "rdma_stack",
    "base_host",
)
"""Those of rack.yml, backwards. A record of a role that is not here comes first."""


def main(wanted, check):
    """Entry point of the action on_node."""
    answer(_restore, wanted, check=check)


def _restore(_wanted, changes, *, folder=FOLDER, root="/"):
    there = os.listdir(folder) if os.path.isdir(folder) else []
    roles = sorted(name.removesuffix(".json") for name in there if name.endswith(".json"))
    roles.sort(key=lambda role: ORDER.index(role) if role in ORDER else -1)
    put_back, failed = {}, []
    for role in roles:
        try:
            put_back[role] = SavedState(role, changes, folder=folder, root=root).restore()
        except (StateError, OSError, ValueError) as error:  # ValueError: a record that is no JSON any more
            failed.append(f"{role}: {error}")
    if failed:
        raise StateError(" | ".join(failed))
    return {"put_back": put_back}
