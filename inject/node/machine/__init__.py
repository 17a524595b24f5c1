"""Actuators of processes, services, CPU, memory, disk, clock and the whole machine."""
