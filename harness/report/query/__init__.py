"""SQL over many runs: tables that are read from run directories, and one read-only statement on them."""
