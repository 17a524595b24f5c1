"""Controller side of the traffic engines: processes on hosts, connections, running traffic and its results."""
