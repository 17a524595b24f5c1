"""Open MPI as a baseline for collectives: its packages and its benchmark program on the hosts."""
