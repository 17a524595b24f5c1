"""Programs of other authors: how their processes ended, and whether their progress is known."""
