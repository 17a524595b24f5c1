"""Two runs of one experiment side by side: the comparison and its page."""
