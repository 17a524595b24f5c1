"""Descriptions of all fault kinds, with a module for each family."""
