"""Throughput against something measured in the same run: perftest, TCP on the same wires, the rates of a lab."""
