"""Analysis of a capture: queue-pair flows, go-back-N verified packet by packet, retransmissions explained. Pure."""
