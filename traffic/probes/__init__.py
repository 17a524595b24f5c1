"""Probes on every path of a fabric: sent, located, and turned into round trips and places of loss."""
