"""What a capture proves: queue-pair flows, go-back-N checked packet by packet, retransmissions explained. Pure."""
