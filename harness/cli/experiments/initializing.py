"""The first files of a user's own experiment: `faultbed init`; and the schema of such files: `faultbed schema`."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

import click

from faultbed.harness.cli.context import Session, pass_session
from faultbed.harness.experiment.declare.editor_schema import schema_text
from faultbed.testbed import shipped
from faultbed.testbed.errors import UsageError

__all__ = ["COMMANDS"]

_TEST = '''"""A test on a lab: each one starts from the lab's snapshot, and fails if it leaves the lab changed."""


def test_job_survives_uplink_flap(traffic, inject):
    fault = inject("link.flap", "used-uplink[*]", for_s=2.0)  # fails unless it provably fired
    job = traffic.collective(size_bytes=1 << 18, iterations=40)
    fault.arm()
    fault.wait()  # until its 2 s are over
    fault.clear()
    assert job.wait(120.0).wrong_elements == 0
'''
_WORKFLOW = """# One run and the tests, each night and by hand. Without /dev/kvm the lab is emulated, and slower.
name: faultbed
on:
  workflow_dispatch:
  schedule:
    - cron: "17 2 * * *"
permissions:
  contents: read
jobs:
  lab:
    runs-on: ubuntu-24.04
    timeout-minutes: 60
    steps:
      - uses: actions/checkout@11bd71901bbe5b1630ceea73d27597364c9af683 # v4.2.2
      - run: sudo apt-get update && sudo apt-get install --yes qemu-system-x86 qemu-utils mmdebstrap zstd uidmap
      - run: python3 -m venv .venv && .venv/bin/pip install faultbed=={version}
      - run: .venv/bin/faultbed doctor
      - run: .venv/bin/faultbed run experiment.toml --down
      - run: .venv/bin/python -m pytest
      - if: always()
        run: .venv/bin/faultbed summary --runs runs >> "$GITHUB_STEP_SUMMARY"
"""


def _files() -> dict[str, str]:
    return {
        "experiment.toml": shipped.experiment_named("minimal").read_text(encoding="utf-8"),
        "schema.json": schema_text(),
        "test_fabric.py": _TEST,
        ".github/workflows/faultbed.yml": _WORKFLOW.replace("{version}", metadata.version("faultbed")),
    }


@click.command()
@click.argument("folder", default=".", metavar="[DIR]", type=click.Path(path_type=Path))
@pass_session
def init(session: Session, folder: Path) -> None:
    """Write a first experiment, a pytest file and a CI workflow into DIR (default: this folder).

    The experiment is the smallest one that comes with faultbed. No existing file is changed: if one of the four is
    there, none is written. Editors that read TOML schemas complete and check the experiment by `schema.json`.
    """
    files = {folder / name: text for name, text in _files().items()}
    if there := [str(path) for path in files if os.path.lexists(path)]:
        raise UsageError(f"{there[0]}: this file exists, so nothing was written; name another folder, or remove it")
    for path, text in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:  # a link or a file that has come meanwhile is not replaced
                file.write(text)
        except OSError as error:
            raise UsageError(
                f"{error.filename or path}: {error.strerror or error}; name a folder in which files can be made"
            ) from error
        session.err.print(f"wrote {path}", soft_wrap=True)
    session.err.print(f"next: `faultbed run {folder / 'experiment.toml'}`, which brings a lab up first", soft_wrap=True)


@click.command()
@pass_session
def schema(session: Session) -> None:
    """Print the JSON Schema of experiment files.

    An editor uses it offline if the first line of the file is `#:schema ./schema.json`, and the schema is there.
    """
    session.out.print(schema_text(), end="", markup=False, highlight=False, soft_wrap=True)


COMMANDS = (init, schema)
