"""Clients of a job's storage on the front end."""
