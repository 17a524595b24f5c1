"""The engine of probes: `python3 -m traffic.node.probe_engine`. It is `traffic.node.engine` by a name of its own.

Probes run beside a job, on the same hosts: who kills or stops the job's engine by its name must not hit theirs. And it
looks after its tasks less often, for it is not to be what makes a host busy.
"""

from traffic.node.engine import main

TICK_NS = 250_000_000

if __name__ == "__main__":
    main(TICK_NS)
