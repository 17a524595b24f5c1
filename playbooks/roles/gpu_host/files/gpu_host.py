"""Bring GPUs to persistence, locked clocks and a running fabric manager, by nvidia-smi and systemd.

A lock of clocks cannot be read back by nvidia-smi: that a role has locked them is in its record, and so a second run
does nothing and a teardown unlocks them. Not yet run on hardware.
"""

from faultbed_saved import SavedState
from faultbed_state import StateError, answer, run

MANAGER = "nvidia-fabricmanager.service"


def main(wanted, check):
    """Entry point of the action on_node."""
    answer(_bring, wanted, check=check)


def _bring(wanted, changes):
    if all(gpu["kind"] == "soft" for gpu in wanted["gpus"]):
        return
    saved = SavedState("gpu_host", changes)
    for index, mode in persistence(run(_query("index,persistence_mode"))):
        if wanted["persistence"]:
            tool = ["nvidia-smi", "-i", index, "-pm"]
            saved.command(f"gpu{index} persistence", have=mode, want="Enabled", do=[*tool, "1"], undo=[*tool, "0"])
        # nvidia-smi tells no lock, and a reboot forgets it: what we have set, and in which boot, is in the record.
        want = str(wanted["lock_mhz"] or "")
        lock, unlock = ["nvidia-smi", "-i", index, "-lgc", f"{want},{want}"], ["nvidia-smi", "-i", index, "-rgc"]
        saved.set_unreadable(f"gpu{index} clocks", want=want, do=lock, undo=unlock)
    if wanted["fabric_manager"] and any(gpu["kind"].endswith("-sxm") for gpu in wanted["gpus"]):
        have = run(["systemctl", "is-active", MANAGER], ok=(0, 3, 4)).strip()
        start, stop = ["systemctl", "start", MANAGER], ["systemctl", "stop", MANAGER]
        saved.command(MANAGER, have=have, want="active", do=start, undo=stop)
    if len(persistence(run(_query("index,persistence_mode")))) != len(wanted["gpus"]):
        raise StateError(f"nvidia-smi does not show the {len(wanted['gpus'])} GPUs of the inventory")


def _query(fields):
    return ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]


def persistence(said):
    """What nvidia-smi prints: [("0", "Enabled"), ...]. A line of another form, as of a lost GPU, is an error."""
    modes = [tuple(word.strip() for word in line.split(",")) for line in said.splitlines() if line.strip()]
    for mode in modes:
        if mode not in ((mode[0], "Enabled"), (mode[0], "Disabled")) or not mode[0].isdecimal():
            raise StateError(f"nvidia-smi does not print index and persistence mode, but: {', '.join(mode)[:200]}")
    return modes
