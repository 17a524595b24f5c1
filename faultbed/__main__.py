"""`python -m faultbed`: the same as the command `faultbed`."""

from faultbed.harness.console import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
