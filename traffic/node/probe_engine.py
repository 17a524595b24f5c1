"""The engine of probes: `faultbed.traffic.node.engine` under another process name.

Probes run next to a job on the same hosts. A fault that kills or stops the job's engine by its process name must not
hit the probes. The probe engine also ticks less often, so that it adds little CPU load to its host.
"""

from faultbed.traffic.node.engine import main

TICK_NS = 250_000_000

if __name__ == "__main__":
    main(TICK_NS)
