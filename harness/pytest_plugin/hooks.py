"""faultbed in pytest: `--lab`, the fixtures `lab`, `traffic` and `inject`, and experiments as test items.

* Every test that takes `lab` starts with the fingerprint of the lab's snapshot and must leave it so: a difference is an
  error of that test, and marks the lab DIRTY: a rack takes no further test then. The lab is reset for the first test
  and after each failure, or for every test with `--faultbed-reset-each`.
* Tests that need no lab come first; a soft lab that is down comes up meanwhile.
* Experiments are items where the project's configuration says so: `faultbed_experiments` lists `*.toml` files, and
  folders of them at any depth. PASS passes, FAIL fails, and so do INCONCLUSIVE and ERROR, because neither shows
  anything. An experiment that the lab is too small for, or of the wrong kind for, or whose faults the lab's owner does
  not allow, is skipped, with the reason; so is a test whose `inject` asks for such a fault.
* A session that skipped for the lab's sake and ran nothing ends with 5: no tests. A lab or a need that is not known
  ends it at once, with 4.
* Quarantine excuses a failure, and never a lab that is DIRTY.
* A test whose `inject` receipts do not all prove their faults fails when it ends, with the reasons. Proven is a fault
  that was armed, fired (while traffic of this test ran, if it started some), was witnessed, was on for its `for_s`
  (without one: until it was cleared), and is gone. `inject(..., prove=False)` exempts one fault, as JUnit and the
  session's summary tell.
* Receipts (JSON) and checks go to JUnit properties, and `quarantine` to those of a test that is in it. The property
  `faultbed_exit_code` is what the command line would end with: 0 PASS, 1 FAIL, 2 INCONCLUSIVE (a fault is not proven),
  3 ERROR, 5 DIRTY (one is not cleared). The session itself ends with pytest's own codes, of which 2 and 5 mean other
  things.

Markers: `soft` (a soft lab), `lab` (a rack), `gpu`, `needs("uplinks >= 2")`.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import sys
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.pytest_plugin.keys import AT_END, EXPERIMENTS, EXPIRED, FAILED, NOT_REQUIRED, QUARANTINED, RAN, RUNNING
from harness.pytest_plugin.skips import lines, reasons, skip
from testbed.errors import DirtyLab, FaultbedError, RevertFailed

# Every pytest session of every project that has faultbed installed imports this module. The product, which takes more
# than a second of CPU, is imported where a session turns out to need it.
if TYPE_CHECKING:
    from harness.pytest_plugin.fixtures import Inject, Traffic
    from inject.injector import Mutation
    from testbed.inventory.lab_inventory import Inventory
    from testbed.lab import Lab

__all__ = ["Inject", "Traffic"]

_MARKERS = (
    "soft: needs a soft lab (QEMU VMs); `--lab` names another inventory than the default one",
    "lab: needs a rack lab; skipped with that reason on a soft one",
    "gpu: needs a real GPU; skipped with that reason where there is none",
    'needs(text, ...): needs of an experiment, such as "uplinks >= 2"; skipped with the reason on a smaller lab',
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Our options."""
    group = parser.getgroup("faultbed", "faultbed: a RoCE lab with faults")
    group.addoption(
        "--lab",
        metavar="INVENTORY",
        default=os.environ.get("FAULTBED_LAB"),
        help="inventory of the lab, or the name of one that comes with faultbed (default: soft, or FAULTBED_LAB); "
        "write --lab=FILE with the equals sign, or pytest looks for its configuration near that file",
    )
    group.addoption(
        "--faultbed-repeat", metavar="N", type=int, default=1, help="run every test that takes the lab N times"
    )
    group.addoption(
        "--faultbed-repeat-slow",
        metavar="N",
        type=int,
        help="those of them that are marked slow N times (default: as --faultbed-repeat)",
    )
    group.addoption(
        "--faultbed-reset-each",
        action="store_true",
        help="reset the lab before every test, not only after one that failed",
    )
    group.addoption(
        "--faultbed-quarantine",
        metavar="FILE",
        help="known flaky tests with the day on which each must be mended (default: faultbed_quarantine of the "
        "configuration file; harness/pytest_plugin/quarantine.py has the format)",
    )
    group.addoption("--faultbed-runs", metavar="DIR", default="runs", help="folder of run directories of experiments")
    parser.addini(
        "faultbed_experiments",
        "experiment files to collect as tests, and folders of them; relative to the configuration file",
        type="paths",
        default=[],
    )
    parser.addini("faultbed_quarantine", "file of known flaky tests, relative to the root folder", default="")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers, and refuse experiments that are configured and not there."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)
    asked = [path.resolve() for path in config.getini("faultbed_experiments")]
    for path in asked:
        if not path.exists():
            said = f"faultbed_experiments: no file or folder {path}; correct the path or remove it"
            raise pytest.UsageError(said)
    config.stash[EXPERIMENTS] = tuple(asked)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`--faultbed-repeat N`: a test that takes the lab becomes N tests."""
    count = int(metafunc.config.getoption("--faultbed-repeat"))
    if count > 1 and "lab" in metafunc.fixturenames:
        metafunc.fixturenames.append("_round")
        metafunc.parametrize("_round", range(count), ids=[f"round{number}" for number in range(count)])


@pytest.hookimpl(tryfirst=True)  # before `-m` and its like choose among all that was collected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests in quarantine may fail until their day is over; after it they fail."""
    _mark_experiments(config, items)
    _leave_rounds_out(config, items)
    _apply_quarantine(config, items)
    items.sort(key=_takes_lab)  # keeps the order otherwise


def _apply_quarantine(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that the project's quarantine file names; do nothing where it has none."""
    named = config.getoption("--faultbed-quarantine") or config.getini("faultbed_quarantine")
    if not named:
        return
    from harness.pytest_plugin import quarantine

    path = config.rootpath / str(named)
    today = dt.datetime.now(dt.UTC).date()
    try:
        entries = quarantine.read(path, today=today)
    except FaultbedError as error:
        raise pytest.UsageError(str(error)) from error
    seen = set()
    for item in items:
        entry = quarantine.match(entries, item.nodeid)
        if entry is not None:
            seen.add(entry.test)
            if entry.expired(today):
                item.stash[EXPIRED] = entry
            else:
                reason = f"quarantine until {entry.until}: {entry.why}"
                item.add_marker(pytest.mark.xfail(reason=reason, strict=False))
                item.stash[QUARANTINED] = True
                item.user_properties.append(("quarantine", reason))
    if gone := _gone(config, [entry.test for entry in entries if entry.test not in seen], items):
        raise pytest.UsageError(f"{path}: no such test: {', '.join(gone)}; remove the entry or correct its name")


def _gone(config: pytest.Config, unseen: list[str], items: list[pytest.Item]) -> list[str]:
    """Tests of entries that are there no more: their file is not, or all of it was collected and they were not."""
    collected = {item.nodeid.partition("::")[0] for item in items}
    asked = config.getoption("keyword") or config.getoption("lf", default=False)
    whole = not asked and not any("::" in argument for argument in config.args)
    files = {test: test.partition("::")[0] for test in unseen}
    return [
        test for test, name in files.items() if not (config.rootpath / name).exists() or (whole and name in collected)
    ]


def _mark_experiments(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Experiments are for `-m soft` or `-m lab`, as the lab is; one that nobody knows is told where it is needed."""
    experiments = [item for item in items if _is_experiment(item)]
    if not experiments:
        return
    from harness.pytest_plugin.session_lab import inventory_of

    with contextlib.suppress(FaultbedError):
        for item in experiments:
            item.add_marker("soft" if inventory_of(config).kind == "soft" else "lab")


def _is_experiment(item: pytest.Item) -> bool:
    """Return whether an item is an experiment; their module is loaded only where a session collects one."""
    items = sys.modules.get("harness.pytest_plugin.items")
    return items is not None and isinstance(item, items.ExperimentItem)


def _ask_what_is_known(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A lab that nobody knows, or a need, is one sentence before the first test, and no traceback of every test."""
    takers = [item for item in items if _takes_lab(item)]
    if not takers:
        return
    from harness.experiment.needs import parse_need
    from harness.pytest_plugin.session_lab import inventory_of

    for item in takers:
        try:
            inventory_of(config)
            for mark in item.iter_markers("needs"):
                tuple(map(parse_need, mark.args))
        except FaultbedError as error:
            raise pytest.UsageError(str(error)) from error
        except ValueError as error:
            raise pytest.UsageError(f"{item.nodeid}: {error}") from error


def _leave_rounds_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`--faultbed-repeat-slow N`: deselect further rounds of tests, or of their parameters, that are marked slow."""
    most = config.getoption("--faultbed-repeat-slow")
    if most is None:
        return
    rounds = {item: getattr(item, "callspec", None) for item in items if item.get_closest_marker("slow")}
    gone = {item for item, call in rounds.items() if call is not None and call.params.get("_round", 0) >= most}
    if gone:
        config.hook.pytest_deselected(items=[item for item in items if item in gone])
        items[:] = [item for item in items if item not in gone]


def _takes_lab(item: pytest.Item) -> bool:
    """Whether an item needs the lab: it is an experiment, or its `lab` is our fixture and not one of the same name."""
    if _is_experiment(item):
        return True
    fixtures = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}  # noqa: SLF001
    return "lab" in fixtures and fixtures["lab"][-1].func.__module__ == __name__


def pytest_collection_finish(session: pytest.Session) -> None:
    """A soft lab that will be needed later, and not at once, comes up from now on."""
    _ask_what_is_known(session.config, session.items)
    config, needs = session.config, [_takes_lab(item) for item in session.items]
    if config.option.collectonly or not any(needs) or needs[0]:
        return
    from harness.pytest_plugin.session_lab import begin_ahead

    with contextlib.suppress(FaultbedError):  # the first test that needs the lab will tell
        begin_ahead(config)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test whose quarantine is over fails until somebody has looked at it."""
    entry = item.stash.get(EXPIRED, None)
    if entry is not None:
        pytest.fail(
            f"its quarantine ended on {entry.until} ({entry.why}): mend it, remove it, or give a new day and reason",
            pytrace=False,
        )


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect an experiment that the project's configuration asks for; another project's TOML files are its own."""
    if file_path.suffix != ".toml":
        return None
    resolved = file_path.resolve()
    if not any(resolved.is_relative_to(place) for place in parent.config.stash[EXPERIMENTS]):
        return None
    from harness.pytest_plugin.items import ExperimentFile

    return ExperimentFile.from_parent(parent, path=file_path)


# Around all others: an interrupted session ends its fixtures in this hook, and one of them may fail (unproven fault).
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    """Leave the lab as it was found, whatever the fixtures do at their end; and say where nothing was proved."""
    session.config.stash[AT_END] = []
    try:
        yield
    finally:
        # A session that has not loaded the module has used no lab.
        if session_lab := sys.modules.get("harness.pytest_plugin.session_lab"):
            session_lab.leave(session.config)
    if _proved_nothing(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def _proved_nothing(config: pytest.Config) -> bool:
    """Whether something was skipped for the lab's sake and nothing else has run: that must not look like a pass."""
    return bool(reasons(config)) and not config.stash.get(RAN, False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how many tests the lab does not fit, and why; and what the exit code means where nothing else ran."""
    for line in lines(config):
        terminalreporter.write_line(line)
    if _proved_nothing(config):
        terminalreporter.write_line("what needs the lab was skipped and nothing else ran: that is no pass", red=True)
    for found in config.stash.get(AT_END, []):
        terminalreporter.write_line(f"ended before its time: {found}", red=True)
    if tests := config.stash.get(NOT_REQUIRED, []):
        terminalreporter.write_line(f"faults that need not be proven (prove=False): {', '.join(tests)}", yellow=True)


def _skip_if_unmet(config: pytest.Config, marks: Iterable[pytest.Mark]) -> None:
    from harness.pytest_plugin.session_lab import inventory_of

    inventory = inventory_of(config)
    for mark in marks:
        if reason := _unfit(mark, inventory):
            skip(config, reason)


def _unfit(mark: pytest.Mark, inventory: Inventory) -> str:
    """Why a lab is none for a test with this mark, or nothing."""
    if mark.name == "lab" and inventory.kind == "soft":
        return "needs a rack lab: --lab names its inventory"
    if mark.name == "soft" and inventory.kind != "soft":
        return "needs a soft lab: it takes the VMs themselves apart"
    if mark.name == "gpu" and not any(gpu.kind != "soft" for host in inventory.topology.hosts for gpu in host.gpus):
        return "needs a real GPU"
    if mark.name == "needs":
        from harness.experiment.needs import parse_need, unmet

        lacking = unmet(tuple(parse_need(text) for text in mark.args), inventory.topology)
        return f"{inventory.name} is not enough: {'; '.join(lacking)}" if lacking else ""
    return ""


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """The lab, in its known state; compared with that state after the test."""
    _skip_if_unmet(request.config, request.node.iter_markers())
    from harness.pytest_plugin.fixtures import lab_of_test

    yield from lab_of_test(request)


def _leaves_dirty(error: BaseException) -> bool:
    """Return whether an error says that the lab is not as it was, or that its state is unknown."""
    return isinstance(error, (DirtyLab, RevertFailed)) or getattr(error, "lab_state", "CLEAN") != "CLEAN"


@pytest.fixture
def traffic(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Traffic]:
    """Workloads on the lab."""
    from harness.pytest_plugin.fixtures import workloads_on

    yield from workloads_on(lab, request)


@pytest.fixture
def fault_mutation() -> Mutation | None:
    """Override to replace every fault's action by nothing, for tests that prove that this is noticed."""
    return None


@pytest.fixture
def inject(
    lab: Lab, tmp_path: Path, request: pytest.FixtureRequest, fault_mutation: Mutation | None
) -> Iterator[Inject]:
    """Faults on the lab; what a test does not clear is cleared for it. A fault that is not proven fails the test.

    Faults that are there together are planned together: one that would change what another one changes is refused.
    """
    from harness.pytest_plugin.fixtures import faults_on

    yield from faults_on(lab, tmp_path, request, fault_mutation)


# Outside pytest's own, which makes an excused failure of one of a test in quarantine.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that failed tells what its workloads have done. No quarantine excuses what it has left behind."""
    report = yield
    if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
        item.stash[FAILED] = True
        excused = item.stash.get(QUARANTINED, False) and hasattr(report, "wasxfail")
        error = call.excinfo.value
        # Whatever goes wrong at the end of a test may leave something behind, unless the error itself knows better.
        knows_clean = getattr(error, "lab_state", None) == "CLEAN"
        if excused and (_leaves_dirty(error) or (report.when == "teardown" and not knows_clean)):
            report.outcome = "failed"
            del report.wasxfail
    if report.when == "call" and not report.skipped:
        item.config.stash[RAN] = True
    if report.when == "call" and report.failed and (started := item.stash.get(RUNNING, [])):
        from harness.pytest_plugin.failure_summary import told

        report.sections += [("traffic", told(one)) for one in started]
    return report


def __getattr__(name: str) -> Any:
    """Import `Inject` and `Traffic`, the types of the fixtures, on first use."""
    if name in __all__:
        from harness.pytest_plugin import fixtures

        return getattr(fixtures, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
