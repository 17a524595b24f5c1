"""Flows between RNICs: specification, run, and what is derived from them."""
