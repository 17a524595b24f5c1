"""Check whether a lab is fit for an experiment: its state compared with its inventory.

collect        the command for each machine, and the facts in its output
checks         the checks, as data: name, source, expected state, advice
rack_checks    checks for hardware only. These have modules of their own: abilities, affinity_check, fec, golden,
               switch_qos. gpu_health_check is for both kinds of lab
rack_formats   parsers of rack tools' output (PCIe, FEC, firmware, GPUs); not yet run on hardware
support_bundle the output of a rack's tools, in one file to send
busbw          the output of nccl-tests, compared with the lab's table
"""
