"""Throughput relative to a reference of the same run: perftest, TCP on the same links, or the lab's set rates."""
