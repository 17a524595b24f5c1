"""Compare our NVML readers with nvidia-smi, while the GPU is idle and while it computes.

    python tests/lab/gpu_day/readers.py OUT

nvidia-smi is read before and after NVML. A value that changes all the time must lie between both, with some room.
`faultbed.testbed.node.gpu.xid` counts events from the kernel's log, which dmesg must have, too.
"""

from __future__ import annotations

import re
import subprocess
import time

import day
import gpu_rank

from faultbed.testbed.node.gpu import nvml
from faultbed.testbed.node.gpu.xid import XidLog, event

FIELDS = (
    *("index", "name", "pci.bus_id", "driver_version", "vbios_version", "persistence_mode", "compute_mode"),
    *(
        "ecc.mode.current",
        "mig.mode.current",
        "clocks.sm",
        "clocks.max.sm",
        "clocks.mem",
        "clocks_event_reasons.active",
    ),
    *("power.draw", "power.draw.instant", "power.draw.average", "power.limit", "power.default_limit"),
    *("power.min_limit", "power.max_limit", "temperature.gpu", "temperature.gpu.tlimit", "utilization.gpu"),
    *("ecc.errors.corrected.volatile.total", "ecc.errors.uncorrected.volatile.total"),
    *("ecc.errors.corrected.aggregate.total", "ecc.errors.uncorrected.aggregate.total"),
    *("pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max"),
)
ROWS = ("remapped_rows.correctable", "remapped_rows.uncorrectable", "remapped_rows.pending", "remapped_rows.failure")
EXACT = {
    "name": "name",
    "vbios": "vbios_version",
    "sm_max_mhz": "clocks.max.sm",
    "ecc_corrected": "ecc.errors.corrected.volatile.total",
    "ecc_uncorrected": "ecc.errors.uncorrected.volatile.total",
    "ecc_corrected_total": "ecc.errors.corrected.aggregate.total",
    "ecc_uncorrected_total": "ecc.errors.uncorrected.aggregate.total",
    "remapped_rows": "remapped_rows.uncorrectable",
}
BETWEEN = {
    "sm_mhz": ("clocks.sm", 30),
    "temp_c": ("temperature.gpu", 2),
    "average_w": ("power.draw.average", 15),
    "instant_w": ("power.draw.instant", 60),
}
"""By our name: the field of nvidia-smi, and the room around its two readings."""


def query(option, fields):
    """Return the fields of the first GPU that this nvidia-smi has; it refuses a query with an unknown field."""
    fields = list(fields)
    while fields:
        text = day.smi(f"{option}={','.join(fields)}", "--format=csv,noheader,nounits")
        unknown = re.search(r'Field "([^"]+)" is not a valid', text)
        if unknown is None:
            return dict(zip(fields, text.splitlines()[0].split(", "), strict=False)) if text.strip() else {}
        fields.remove(unknown[1])
    return {}


def smi_values():
    return {**query("--query-gpu", FIELDS), **query("--query-remapped-rows", ROWS)}


def reading():
    """Return one reading by NVML between two by nvidia-smi."""
    before = smi_values()
    facts = nvml.look()
    counted = dict(nvml.counts(None))
    samples = nvml.power_samples(facts["gpus"][0]["bus_id"], 0.02)
    power = next(samples)
    samples.close()
    text = day.smi("-q", "-d", "TEMPERATURE,PERFORMANCE,POWER,ROW_REMAPPER,ECC")
    return {"before": before, "look": facts, "counts": counted, "power": power, "after": smi_values(), "q": text}


def compare(read):
    """Yield each comparison of a reading: words, and whether both agree. Pure."""
    before, after, (gpu, *_) = read["before"], read["after"], read["look"]["gpus"]
    watts = {f"{name}_w": read["power"][f"{name}_mw"] for name in ("instant", "average")}
    ours = {
        **gpu,
        **{name.partition(".")[2]: value for name, value in read["counts"].items() if name.startswith("gpu0.")},
        **{name: value / 1000 for name, value in watts.items() if value is not None},
    }
    yield "driver", read["look"]["driver"] == before["driver_version"]
    yield "bus id", gpu["bus_id"] == before["pci.bus_id"].lower()
    yield "persistence", {True: "Enabled", False: "Disabled"}.get(gpu["persistence"]) == before["persistence_mode"]
    yield "ECC mode", {True: "Enabled", False: "Disabled"}.get(gpu["ecc"]) == before["ecc.mode.current"]
    yield f"power limit {gpu['power_limit_w']} W", gpu["power_limit_w"] == round(float(before["power.limit"]))
    for name, field in EXACT.items():
        yield f"{name} {ours.get(name)}, {field} {before.get(field)}", str(ours.get(name)) == before.get(field)
    for name, (field, room) in BETWEEN.items():
        ends = [float(each[field]) for each in (before, after) if re.fullmatch(r"[\d.]+", each.get(field, ""))]
        words = f"{name} {ours.get(name)}, {field} {before.get(field)} to {after.get(field)}"
        yield words, bool(ends) and name in ours and min(ends) - room <= ours[name] <= max(ends) + room
    ends = [int(each["clocks_event_reasons.active"], 16) for each in (before, after)]
    yield f"event reasons {gpu['reasons']:#x}, {ends[0]:#x} and {ends[1]:#x}", gpu["reasons"] in ends
    for flag, field in (("remap_pending", ROWS[2]), ("remap_failed", ROWS[3])):
        yield (
            f"{flag} {gpu[flag]}, {before.get(field)}",
            {False: "No", True: "Yes"}[gpu[flag]] == before.get(field) or (str(int(gpu[flag])) == before.get(field)),
        )
    yield from thresholds(gpu, read["q"])


def thresholds(gpu, text):
    """Yield comparisons of temperature thresholds with what `nvidia-smi -q -d TEMPERATURE` says. Pure."""
    limits = {name: int(value) for name, value in re.findall(r"GPU (\S+) T\.Limit Temp *: (-?\d+) C", text)}
    now = re.search(r"GPU T\.Limit Temp *: (-?\d+) C", text)
    for name in ("Slowdown", "Shutdown"):
        ours = gpu[f"{name.lower()}_c"]
        if now is not None and name in limits:
            expected = gpu["temp_c"] + int(now[1]) - limits[name]
            yield (
                f"{name.lower()} {ours} °C, by nvidia-smi {expected} °C",
                ours is not None and abs(ours - expected) <= 2,
            )
        else:
            absolute = re.search(rf"GPU {name} Temp *: (\d+) C", text)
            expected = int(absolute[1]) if absolute else None
            yield f"{name.lower()} {ours} °C, by nvidia-smi {expected}", ours == expected


def main():
    xids = XidLog()
    idle = reading()
    rank = gpu_rank.Rank(gpu_rank.first_pcie())
    try:
        rank.took_s(gpu_rank.WARM)
        rank.start(4000)  # 8 s
        time.sleep(1.5)
        busy = reading()
        rank.finish()
    finally:
        rank.close()
    log = subprocess.run(["dmesg"], capture_output=True, text=True, check=False).stdout
    events = [line for line in log.splitlines() if event(line)]
    counted = sum(xids.counts().values())
    xids.close()
    driver_lines = [line for line in log.splitlines() if "NVRM" in line or "nvidia" in line.lower()]
    day.save("readers.json", idle=idle, busy=busy, xid_lines=events, xids_counted=counted, driver_lines=driver_lines)
    clocks, powers = ([each["power"][name] for each in (idle, busy)] for name in ("sm_mhz", "instant_mw"))
    day.conclude(
        [
            *((f"idle: {words}", is_right) for words, is_right in day.attempted(compare(idle))),
            *((f"busy: {words}", is_right) for words, is_right in day.attempted(compare(busy))),
            (f"clock, idle and busy: {clocks} MHz", None not in clocks and clocks[0] <= clocks[1]),
            (f"power, idle and busy: {powers} mW", None not in powers and powers[0] < powers[1]),
            (f"XIDs meanwhile: {counted} counted; since boot in the log: {len(events)}", counted <= len(events)),
        ]
    )


if __name__ == "__main__":
    main()
