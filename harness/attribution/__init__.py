"""Whose fault it was, blind to what was injected, and how often that is right. Pure but for the campaign."""
