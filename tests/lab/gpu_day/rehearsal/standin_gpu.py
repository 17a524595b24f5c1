"""A GPU that is a folder of files: what processes of a rehearsal have done to it, for stand-ins of its libraries.

`PID.context` exists while a process has a context, `PID.busy` (with the kind of work) while it works. Times, clocks and
watts resemble those of an H100. Nothing of a rehearsal is a measurement.
"""

# It is imported by every process of a rehearsal, and pathlib would make each start slower.
# ruff: noqa: PTH103, PTH108, PTH110, PTH119, PTH123, PTH207

import functools
import glob
import os
import sys
import time

FOLDER = os.environ.get("FAULTBED_REHEARSAL_STATE", "/tmp/faultbed-rehearsal")
UNIT_S = {"compute": 0.002, "reduce": 0.0005, "copy": 1 / 20e9}
WATTS = {"compute": 400, "reduce": 240, "copy": 140}
BUS = "00000000:19:00.0"


def processes(ending):
    """Return the ids of the running processes with a file of this ending; a stopped process does no work."""
    found = {}
    for path in glob.glob(f"{FOLDER}/*.{ending}"):
        pid = os.path.basename(path).partition(".")[0]
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat, open(path) as content:
                state = stat.read().rpartition(")")[2].split()[0]
                if state not in "ZX" and (ending != "busy" or state not in "Tt"):
                    found[int(pid)] = content.read()
        except OSError:
            continue
    return found


def spend(kind, amount):
    """Do work: it takes longer while other processes work, too."""
    os.makedirs(FOLDER, exist_ok=True)
    mine = f"{FOLDER}/{os.getpid()}"
    if kind == "context":
        if amount > 0:
            open(f"{mine}.context", "w").close()
        elif os.path.exists(f"{mine}.context"):
            os.unlink(f"{mine}.context")
        return
    left_s = UNIT_S[kind] * amount
    with open(f"{mine}.busy", "w") as file:
        file.write(kind)
    while left_s > 0:
        others = sum(word == "compute" for pid, word in processes("busy").items() if pid != os.getpid())
        start = time.monotonic()
        time.sleep(min(left_s * (1 + others), 0.005))
        left_s -= (time.monotonic() - start) / (1 + others)
    os.unlink(f"{mine}.busy")


def watts():
    kinds = [WATTS[kind] for kind in processes("busy").values() if kind in WATTS]
    return max(kinds) if kinds else 115 if processes("context") else 70


def card():
    """Return the GPU as the stand-in of NVML has it."""
    from nvml_library import Card

    busy = bool(processes("busy"))
    return Card(
        bus=BUS, reasons=0 if busy else 1, sm_mhz=1980 if busy else 345, celsius=33, limits_c=None, margin_c=54,
        tlimits={193: -8, 194: -2}, pids=sorted(processes("context")), energy_mj=None,
        power_mw={185: watts() * 1000, 186: watts() * 1000},
    )  # fmt: skip


@functools.cache
def nvml():
    from nvml_library import Library

    class OnFiles(Library):
        def _card(self, handle):
            return card()

    return OnFiles([card()])


@functools.cache
def cuda(_pid):
    from cuda_library import Library

    return Library(spend=spend)


def smi(arguments):
    """Print what nvidia-smi would."""
    busy, power = bool(processes("busy")), watts()
    values = {
        "index": "0", "name": "NVIDIA H100 80GB HBM3", "pci.bus_id": BUS, "driver_version": "550.54.15",
        "vbios_version": "96.00.74.00.01", "persistence_mode": "Enabled", "compute_mode": "Default",
        "ecc.mode.current": "Enabled", "mig.mode.current": "Disabled", "clocks.sm": "1980" if busy else "345",
        "clocks.max.sm": "1980", "clocks.mem": "2619", "clocks_event_reasons.active": f"0x{0 if busy else 1:016x}",
        "power.draw": f"{power}.00", "power.draw.instant": f"{power}.00", "power.draw.average": f"{power}.00",
        **dict.fromkeys(("power.limit", "power.default_limit", "power.max_limit"), "700.00"),
        "power.min_limit": "200.00", "temperature.gpu": "33", "utilization.gpu": "99" if busy else "0",
        **{f"ecc.errors.{kind}.{span}.total": "0" for kind in ("corrected", "uncorrected")
           for span in ("volatile", "aggregate")},
        **{f"pcie.link.{what}.{when}": "5" if what == "gen" else "16"
           for what in ("gen", "width") for when in ("current", "max")},
        "remapped_rows.correctable": "0", "remapped_rows.uncorrectable": "0", "remapped_rows.pending": "No",
        "remapped_rows.failure": "No",
    }  # fmt: skip
    for word in arguments:
        if word.startswith("--query"):
            fields = word.partition("=")[2].split(",")
            unknown = [field for field in fields if field not in values]
            if unknown:
                print(f'Field "{unknown[0]}" is not a valid field to query.')
                sys.exit(2)
            print(", ".join(values[field] for field in fields))
            return
    print("REHEARSAL\nGPU T.Limit Temp : 54 C\nGPU Shutdown T.Limit Temp : -8 C\nGPU Slowdown T.Limit Temp : -2 C")
