"""Actuators of GPUs: processes on the same GPU, events in the kernel's log, and the synthetic health of soft GPUs."""
