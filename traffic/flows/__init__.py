"""Flows between RNICs: specification, execution and results."""
