"""Traffic code that runs on a host. It needs pyverbs, numpy and the standard library only."""
