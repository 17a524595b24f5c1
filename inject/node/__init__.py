"""Code that runs on the target of a fault. It needs only the standard library and what the node's distribution has."""
