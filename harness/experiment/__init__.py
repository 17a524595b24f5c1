"""The experiment file, its vocabulary, and the plan that it becomes with a seed."""
