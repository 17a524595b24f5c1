"""Stop conditions: what was seen of them, and the claims that none of them held unseen."""
