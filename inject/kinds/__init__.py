"""The descriptions of all fault kinds, a module for each family."""
