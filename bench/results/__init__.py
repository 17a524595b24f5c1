"""Reading results: the size and the loading of pages, and queries over many runs."""
