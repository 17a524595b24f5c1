"""Results of a run: timeline, impacts, phases, routing, slow ranks and link loads, with their intervals. Pure."""
