"""Sample the power of a GPU by NVML, as JSON lines.

    python3 -m faultbed.testbed.node.gpu.power PCIE EVERY_MS

Each line is a sample of `faultbed.testbed.node.gpu.nvml.power_samples`. The process ends when its stdin is closed. If
NVML gives no answer, it prints `{"error": ...}` and ends.
"""

from __future__ import annotations

import json
import select
import sys

from faultbed.testbed.node.gpu import nvml

__all__ = ["main"]


def main() -> None:
    """Run the process."""
    pcie, every_ms = sys.argv[1:]
    try:
        for sample in nvml.power_samples(pcie, float(every_ms) / 1000):
            print(json.dumps(sample), flush=True)
            if select.select([sys.stdin], [], [], 0)[0]:
                return
    except nvml.NoNvml as error:
        print(json.dumps({"error": str(error)}), flush=True)
    except BrokenPipeError:
        return


if __name__ == "__main__":
    main()
