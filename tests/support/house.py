"""Paths of this project's files."""

from pathlib import Path

HOUSE = Path(__file__).resolve().parents[2]
DEMO = HOUSE / "tests" / "experiments" / "demo.toml"
DATA = HOUSE / "tests" / "data"
TRACES = DATA / "traces"
# What tests share; a program that a test starts finds it there.
SUPPORT = HOUSE / "tests" / "support"
