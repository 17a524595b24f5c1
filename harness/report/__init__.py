"""Reports about one or several runs: the page with its drawings and charts, the comparison, and the history."""
