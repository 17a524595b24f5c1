"""What may be injected together, and what a lab's owner allows. Pure."""
