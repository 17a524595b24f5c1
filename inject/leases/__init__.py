"""How the controller reaches the holder of a fault: channel, lease, and claims of other sessions."""
