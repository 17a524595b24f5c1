"""Record the machine and its GPU's settings; the second time, compare the settings with the first.

python tests/lab/gpu_day/machine.py OUT before|after

What identifies the machine (serial numbers, UUIDs) is removed: the files become recorded data of this project.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from pathlib import Path

import day

from faultbed.testbed.node.gpu import nvml

COMMANDS = {
    "smi": ("nvidia-smi",),
    "smi_q": ("nvidia-smi", "-q"),
    "smi_topology": ("nvidia-smi", "topo", "-m"),
    "modules": ("sh", "-c", "cat /proc/driver/nvidia/version; lsmod | grep -i -e nvidia -e ib_ -e mlx"),
    "infiniband": ("sh", "-c", "ls -l /dev/infiniband /sys/class/infiniband /sys/kernel/dmabuf"),
    "pci": ("sh", "-c", "for d in /sys/bus/pci/devices/*; do echo $d $(cat $d/vendor $d/device $d/class); done"),
    "dmesg": ("sh", "-c", "dmesg | grep -i -e nvrm -e nvidia -e xid | tail -100"),
    "cpu": ("sh", "-c", "nproc; free -m; df -h /tmp /dev/shm; which awk nvcc dcgmi"),
}

IDENTITY = re.compile(r"(?m)((?:Serial Number|UUID|PDI|GUID)\s*: )(?!N/A).*$|GPU-[0-9a-f]{8}-[0-9a-f-]+")
"""Of the text of `nvidia-smi -q` and `nvidia-smi -L`."""


def anonymous(text):
    """Return the text without serial numbers and UUIDs. Pure."""
    return IDENTITY.sub(lambda match: f"{match[1] or ''}removed", text)


def main():
    when = sys.argv[2]
    texts = {}
    for name, command in COMMANDS.items():
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
            texts[name] = anonymous(done.stdout + done.stderr)
        except (OSError, subprocess.TimeoutExpired) as error:
            texts[name] = repr(error)
    settings, facts = nvml.settings(), nvml.look()
    day.save(f"machine-{when}.json", texts=texts, settings=settings, look=facts, python=platform.python_version())
    print(texts["smi"], texts["modules"], texts["infiniband"], sep="\n")
    checks = [(f"NVML: driver {facts['driver']}, {len(facts['gpus'])} GPUs, {facts['why']}", bool(facts["gpus"]))]
    earlier = Path(sys.argv[1]) / "machine-before.json"
    if when == "after" and earlier.exists():
        before = json.loads(earlier.read_text())["settings"]
        checks.append((f"settings as before: {settings}", settings == before))
    day.conclude(checks)


if __name__ == "__main__":
    main()
