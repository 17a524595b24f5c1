"""Actuators of processes, CPU, memory, disk, GPU and the whole machine."""
