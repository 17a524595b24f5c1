"""Proof that a fault happened: witnesses, firing times, reboots and the receipt."""
