"""What a run shows: timeline, impacts, phases, routing, slow ranks, link loads, each with its interval. Pure."""
