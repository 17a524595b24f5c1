"""Actuators of GPUs: programs beside the victim, events in the kernel's log, and the synthetic health of soft GPUs."""
