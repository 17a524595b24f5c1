"""Access to the machines of a lab: SSH, JSON lines over it, and the code that is pushed to nodes."""
