"""One experiment on one lab, or the same several times: the loop, what it sees on the way, and what it needs before."""
