"""What a lab is made of, and how its parts are selected by name. Pure."""
