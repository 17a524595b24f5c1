"""Before a run changes anything: the experiment is resolved against the lab, hosts are checked and excluded."""
