"""Commands that make traffic or probe a fabric."""
