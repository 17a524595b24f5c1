"""Whether a lab is fit for an experiment: what it should be by its inventory, and what it is.

looks          what is asked of each machine (one command), and the facts in the answer
checks         the checks, as data: name, how it is looked at, what is right, what to do
rack_checks    those that only hardware can answer; abilities, affinity, fec and golden are four of them
rack_formats   readers for the tools of racks (PCIe, FEC, firmware, GPUs); not yet run on hardware
support_bundle what a rack's tools print, in one file to send
busbw          what nccl-tests printed, against the lab's table
"""
