"""What a person asks for: the experiment file, its words, and the plan that it becomes with a seed."""
