"""Jobs that survive the loss of a node: state machine, placement, and the run on a lab."""
