"""Capture of the packets that pass the switch ports of the experiment."""
