"""Blind attribution of a run's symptoms to a place and a cause, and its precision. Pure, except for the campaign."""
