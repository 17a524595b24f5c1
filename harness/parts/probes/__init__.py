"""Probes beside the workload: datagrams between the racks, with the path of each."""
