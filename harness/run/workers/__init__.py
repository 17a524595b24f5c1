"""Runs on several labs at a time: worker processes, each with a lab, and what they are given to do."""
