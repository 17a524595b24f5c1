"""Where things of this project lie."""

from pathlib import Path

HOUSE = Path(__file__).resolve().parents[2]
DEMO = HOUSE / "tests" / "experiments" / "demo.toml"
TRACES = HOUSE / "tests" / "data" / "traces"
