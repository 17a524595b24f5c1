"""Part `report` of the bench: size of a ten-minute run's report, and the time until Chromium has loaded it.

The run is a job of four ranks on the default lab, with a fault in most of its minutes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.results import chromium
from bench.rows import Row, mark
from faultbed.harness.experiment.experiment_file import decode
from faultbed.harness.report import run_page
from faultbed.harness.run import loop
from faultbed.harness.verdict import Verdict
from faultbed.testbed.errors import LabError
from faultbed.testbed.inventory.lab_inventory import Inventory

__all__ = ["EXPERIMENT", "measure"]

EXPERIMENT = """
name = "ten-minutes"
seed = 1
lab = { kind = "soft", needs = ["rdma", "gpu", "hosts >= 4", "uplinks >= 2"] }

[workload]
collective = "all-reduce"
algorithm = "ring"
size = "1MiB"
duration = "600s"
compute_units = 10

[[expect]]
metric = "wrong_elements"
max = 0
"""
_FAULTS = (
    ("link.flap", "rtsw1:ctsw1", "1s", ""),
    ("packet.drop", "host3:rxe0", "5s", "share = 0.02"),
    ("gpu.throttle", "host2:gpu0", "10s", "percent = 75"),
    ("link.down", "rtsw2:ctsw2", "5s", ""),
    ("packet.corrupt", "host2:rxe0", "5s", "share = 0.02"),
    ("host.freeze", "host4", "2s", ""),
    ("switch.bgp-reset", "rtsw1", "1s", ""),
    ("packet.reorder", "host1:rxe0", "5s", "share = 0.02"),
)
_EVERY_S = 60
"""Time between the starts of two faults, and from the start of the workload to the first fault."""
MOST_BYTES, MOST_S, LOADS, WIDTH = 3_000_000, 1.0, 5, 1200
"""Goals for the page's size and its load time; number of times it is loaded; width of the window in pixels."""


def with_faults() -> str:
    """Return the experiment with its faults, one per minute."""
    tables = (
        f'\n[[faults]]\nkind = "{kind}"\ntarget = "{target}"\nat = "{_EVERY_S * (1 + number)}s"\nfor = "{lasts}"\n'
        f"set = {{ {settings} }}\n"
        for number, (kind, target, lasts, settings) in enumerate(_FAULTS)
    )
    return EXPERIMENT + "".join(tables)


def name_of(resolved: loop.ResolvedRun) -> str:
    """Return the name of the report in the rows of the bench."""
    return f"report of a run of {resolved.plan.workload['duration_ns'] / 1e9:.0f} s with {len(_FAULTS)} faults"


def measure(inventory: Inventory, progress: Callable[[str], None]) -> Iterator[Row]:
    """Yield the size of the page, the CPU time to render it again, and the time until Chromium has loaded it.

    Raises:
        LabError: the run ended as ERROR, or the browser does not answer.
    """
    source = with_faults()
    resolved = loop.resolve(decode(source.encode(), source="ten-minutes"), source.encode(), inventory)
    title = name_of(resolved)
    with tempfile.TemporaryDirectory() as folder:
        ran = loop.execute(resolved, inventory, out=Path(folder), progress=progress)
        if ran.verdict.verdict is Verdict.ERROR:
            raise LabError(f"bench: the run ended as ERROR: {ran.verdict}")
        began = time.process_time()
        page = run_page.render(ran.run_dir.path)
        took_s, size = time.process_time() - began, page.stat().st_size
        yield (
            f"{title}: size",
            f"{size / 1e6:.2f} MB",
            "",
            f"<= {MOST_BYTES / 1e6:g} MB",
            mark(reached=size <= MOST_BYTES),
        )
        yield f"{title}: rendered again", f"{took_s:.1f} s CPU", "", "", ""
        yield _load_time(title, page, Path(folder) / "profile")


def _load_time(report: str, page: Path, profile: Path) -> Row:
    title, goal = f"{report}: from navigation to the load event in Chromium, {WIDTH} pixels wide", f"<= {MOST_S:g} s"
    program = chromium.installed()
    if program is None:
        return title, "not measured", "no Chromium here", goal, ""
    with chromium.browser(program, profile) as browser:
        times = []
        for _ in range(LOADS):
            browser.open(page, width=WIDTH)
            ended_ms = 0.0
            while not ended_ms:  # `open` returns when the load event begins; it ends a moment later
                ended_ms = browser.value("performance.getEntriesByType('navigation')[0].loadEventEnd")
            times.append(ended_ms / 1e3)
    middle = statistics.median(times)
    return (
        title,
        f"{middle:.2f} s",
        f"{min(times):.2f}..{max(times):.2f}, n={LOADS}",
        goal,
        mark(reached=middle <= MOST_S),
    )
