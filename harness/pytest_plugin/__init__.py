"""faultbed in pytest: options, fixtures, experiments as test items, and the lab of a session."""
