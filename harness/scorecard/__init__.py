"""Score programs that use RDMA: a published set of faults, under several settings of retries, with several seeds.

`programs/` has a file for each program, `faults.toml` the published set of faults. A scorecard is a sweep
(`faultbed.harness.run.sweeps`) over program, setting and fault. What it adds is the table of what programs survived.
"""
