"""Results of a run with their intervals: timeline, phases, routing, slow ranks and link loads. Pure."""
