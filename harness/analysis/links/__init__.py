"""Links between switches: what they carried, what they should have, and how evenly."""
