"""Programs of other authors on a host: started in a cgroup of the run, read for progress, and ended with the run."""
