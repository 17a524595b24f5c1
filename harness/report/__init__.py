"""What people read of a run or of several: the page with its drawings and charts, the comparison, the history."""
