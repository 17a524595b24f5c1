"""The routing scheme that the switches have in every pass."""
