"""Open MPI, which collectives are compared with: its packages on the hosts, and its program there."""
