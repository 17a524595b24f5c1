"""Restore what the roles of rack labs have changed on a machine: settings of tools, sysctls and files.

Roles are restored in reverse order: tools that restore an RNIC's settings (mlnx_qos, ethtool) may be in packages that
an earlier role installed. A role that cannot be restored completely does not keep other roles from being restored.
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
"""The roles of rack.yml in reverse order. The record of a role that is not listed is restored first."""


def main(desired, check):
    """Entry point of the action on_node."""
    answer(_restore, desired, check=check)


def _restore(_desired, changes, *, folder=FOLDER, root="/"):
    names = os.listdir(folder) if os.path.isdir(folder) else []
    roles = sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))
    roles.sort(key=lambda role: ORDER.index(role) if role in ORDER else -1)
    restored_counts, failed = {}, []
    for role in roles:
        try:
            restored_counts[role] = SavedState(role, changes, folder=folder, root=root).restore()
        except (StateError, OSError, ValueError) as error:  # ValueError: the record is not valid JSON
            failed.append(f"{role}: {error}")
    if failed:
        raise StateError(" | ".join(failed))
    return {"put_back": restored_counts}
