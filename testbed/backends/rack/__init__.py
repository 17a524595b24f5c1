"""What only rack labs have: the status of their machines, and power cycles by BMC."""
