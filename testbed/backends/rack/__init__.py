"""Code for rack labs only: the status of their machines, and power cycles by BMC."""
