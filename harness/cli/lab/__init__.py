"""Commands about labs: their life, inventories, checks, sharing and counters."""
