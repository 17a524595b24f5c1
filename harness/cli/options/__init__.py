"""Options and output files that several commands share."""
