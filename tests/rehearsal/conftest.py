"""Fixtures of the rehearsal."""

from role_programs import changes, load, program, saved_state  # noqa: F401 (fixtures)
