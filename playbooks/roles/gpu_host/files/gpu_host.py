"""Configure GPUs by nvidia-smi and systemd: persistence mode, locked clocks, fabric manager.

nvidia-smi cannot report a lock of clocks. The role saves its own lock instead, so that a second run does nothing and a
teardown unlocks the clocks. Not yet run on hardware.
"""

from faultbed_saved import SavedState
from faultbed_state import StateError, answer, run

MANAGER = "nvidia-fabricmanager.service"


def main(desired, check):
    """Entry point of the action on_node."""
    answer(_configure, desired, check=check)


def _configure(desired, changes):
    if all(gpu["kind"] == "soft" for gpu in desired["gpus"]):
        return
    saved = SavedState("gpu_host", changes)
    for index, mode in persistence(run(_query("index,persistence_mode"))):
        if desired["persistence"]:
            tool = ["nvidia-smi", "-i", index, "-pm"]
            saved.command(
                f"gpu{index} persistence", current=mode, desired="Enabled", do=[*tool, "1"], undo=[*tool, "0"]
            )
        clock_mhz = str(desired["lock_mhz"] or "")
        tool = ["nvidia-smi", "-i", index]
        lock, unlock = [*tool, "-lgc", f"{clock_mhz},{clock_mhz}"], [*tool, "-rgc"]
        saved.set_unreadable(f"gpu{index} clocks", desired=clock_mhz, do=lock, undo=unlock)
    if desired["fabric_manager"] and any(gpu["kind"].endswith("-sxm") for gpu in desired["gpus"]):
        state = run(["systemctl", "is-active", MANAGER], ok=(0, 3, 4)).strip()
        start, stop = ["systemctl", "start", MANAGER], ["systemctl", "stop", MANAGER]
        saved.command(MANAGER, current=state, desired="active", do=start, undo=stop)
    count = len(persistence(run(_query("index,persistence_mode"))))
    if count != len(desired["gpus"]):
        raise StateError(
            f"nvidia-smi lists {count} GPUs, the inventory has {len(desired['gpus'])}; correct faultbed_gpus, or check "
            "the host"
        )


def _query(fields):
    return ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]


def persistence(output):
    """Return the persistence modes in nvidia-smi's output: [("0", "Enabled"), ...], by index of the GPU.

    Raises:
        StateError: a line has another form; nvidia-smi prints such a line for a GPU that is lost.
    """
    modes = [tuple(word.strip() for word in line.split(",")) for line in output.splitlines() if line.strip()]
    for mode in modes:
        if mode not in ((mode[0], "Enabled"), (mode[0], "Disabled")) or not mode[0].isdecimal():
            raise StateError(
                f"nvidia-smi: expected index and persistence mode, it printed {', '.join(mode)[:200]!r}; check the GPUs"
            )
    return modes
