"""The engine of probes: `python3 -m traffic.node.prober`. It is `traffic.node.engine` by a name of its own.

Probes run beside a job, on the same hosts: who kills or stops the job's engine by its name must not hit theirs.
"""

from traffic.node.engine import main

if __name__ == "__main__":
    main()
