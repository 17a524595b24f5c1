"""faultbed in pytest: `--lab`, the fixtures `lab`, `traffic` and `inject`, and experiments as test items.

* Every test that takes `lab` starts with the fingerprint of the lab's snapshot and must restore it. A difference is an
  error of that test and marks the lab DIRTY; no further test runs on a rack then. The lab is reset for the first test
  and after each failure, or for every test with `--faultbed-reset-each`.
* Tests that need no lab come first; a soft lab that is down comes up meanwhile.
* Experiments are items where the project's configuration says so: `faultbed_experiments` lists `*.toml` files, and
  folders of them at any depth. PASS passes; FAIL, INCONCLUSIVE and ERROR fail. An experiment is skipped, with the
  reason, if the lab is too small or of the wrong kind for it, or if the lab's owner does not allow its faults; so is a
  test that injects such a fault.
* A session in which tests were skipped because of the lab and no test ran ends with 5: no tests. An unknown lab or
  need ends it at once, with 4.
* Quarantine and `xfail` excuse a failure, but never a lab that is DIRTY.
* A test fails at its end if an `inject` receipt does not prove its fault, with the reasons. A fault is proven if it was
  armed, fired, was witnessed, was on for its `for_s` (without one: until it was cleared), and is cleared. If the test
  starts traffic, or tries to, all of that must have happened while one workload ran, as in `faultbed run`.
  `inject(..., prove=False)` exempts one fault, which JUnit and the summary show.
* A test fails at its end if a workload failed or had wrong data that the test did not wait for (`wait`).
* Receipts (JSON) and checks go to JUnit properties, and `quarantine` to those of a test that is in it. The property
  `faultbed_exit_code` is what the command line would end with: 0 PASS, 1 FAIL, 2 INCONCLUSIVE (a fault is not proven,
  or a kernel's log could not be read), 3 ERROR (a kernel reported a problem), 5 DIRTY (a fault is not cleared, or the
  lab has changed). The session itself ends with pytest's own codes, of which 2 and 5 mean other things.

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

from faultbed.harness.pytest_plugin.keys import (
    ANY_FAILED,
    AT_END,
    BEGAN,
    ENDED,
    EXPERIMENTS,
    EXPIRED,
    FAILED,
    FAULTS,
    NOT_CLEARED,
    NOT_STARTED,
    OPENED_LAB,
    PROOF_NOT_REQUIRED,
    PROPERTIES,
    QUARANTINED,
    RAN,
    RUNNING,
)
from faultbed.harness.pytest_plugin.skips import add_worker_reasons, reasons, report_to_controller, skip, summary_lines
from faultbed.testbed.errors import DirtyLab, FaultbedError, RevertFailed

# Every pytest session of every project that has faultbed installed imports this module. The product, which takes more
# than a second of CPU, is imported where a session turns out to need it.
if TYPE_CHECKING:
    from faultbed.harness.pytest_plugin.fixtures import Inject, Traffic
    from faultbed.inject.injector import Mutation
    from faultbed.testbed.inventory.lab_inventory import Inventory
    from faultbed.testbed.lab import Lab

__all__ = ["Inject", "Traffic", "uses_lab"]

_MARKERS = (
    "soft: needs a soft lab (QEMU VMs); `--lab` names another inventory than the default one",
    "lab: needs a rack lab; skipped with that reason on a soft one",
    "gpu: needs a real GPU; skipped with that reason where there is none",
    'needs(text, ...): needs of an experiment, such as "uplinks >= 2"; skipped with the reason on a smaller lab',
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of faultbed."""
    group = parser.getgroup("faultbed", "faultbed: a RoCE lab with faults")
    group.addoption(
        "--faultbed-repeat", metavar="N", type=int, default=1, help="run every test that takes the lab N times"
    )
    group.addoption(
        "--faultbed-repeat-slow",
        metavar="N",
        type=int,
        help="run the tests among these that are marked slow N times (default: as --faultbed-repeat)",
    )
    group.addoption(
        "--faultbed-reset-each",
        action="store_true",
        help="reset the lab before every test, not only after one that failed",
    )
    group.addoption(
        "--faultbed-quarantine",
        metavar="FILE",
        help="known flaky tests with the date by which each must be fixed (default: faultbed_quarantine of the "
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


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(parser: pytest.Parser) -> Generator[None, None, None]:
    """Add `--lab` after the options of all other plugins and of the project's first conftest files.

    pytest has one option of a name. Added last, a second `--lab` is this plugin's to report; added first, the other
    one would end with a ValueError and a traceback.

    Raises:
        pytest.UsageError: another plugin or a conftest has an option `--lab`.
    """
    yield
    try:
        parser.getgroup("faultbed").addoption(
            "--lab",
            metavar="INVENTORY",
            default=os.environ.get("FAULTBED_LAB"),
            help="inventory of the lab, or the name of one that comes with faultbed (default: soft, or FAULTBED_LAB); "
            "write --lab=FILE with the equals sign, or pytest looks for its configuration near that file",
        )
    except ValueError as error:
        message = (
            "--lab: another pytest plugin or a conftest.py has an option of this name; rename that one, or switch this "
            "plugin off with `-p no:faultbed`"
        )
        raise pytest.UsageError(message) from error


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers, and reject configured experiments that do not exist."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)
    experiments = [path.resolve() for path in config.getini("faultbed_experiments")]
    for path in experiments:
        if not path.exists():
            message = f"faultbed_experiments: no file or folder {path}; correct the path or remove it"
            raise pytest.UsageError(message)
    config.stash[EXPERIMENTS] = tuple(experiments)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Turn a test that uses the lab into N tests for `--faultbed-repeat N`."""
    count = int(metafunc.config.getoption("--faultbed-repeat"))
    if count > 1 and "lab" in metafunc.fixturenames:
        metafunc.fixturenames.append("_round")
        metafunc.parametrize("_round", range(count), ids=[f"round{number}" for number in range(count)])


@pytest.hookimpl(tryfirst=True)  # before `-m` and `-k` deselect tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark experiments and tests in quarantine, and sort tests that need no lab to the front."""
    _mark_experiments(config, items)
    _deselect_rounds(config, items)
    _apply_quarantine(config, items)
    items.sort(key=uses_lab)  # keeps the order otherwise


def _apply_quarantine(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that the project's quarantine file names, if it has one."""
    named = config.getoption("--faultbed-quarantine") or config.getini("faultbed_quarantine")
    if not named:
        return
    from faultbed.harness.pytest_plugin import quarantine

    path = config.rootpath / str(named)
    today = dt.datetime.now(dt.UTC).date()
    try:
        entries = quarantine.read(path, today=today)
    except FaultbedError as error:
        raise pytest.UsageError(str(error)) from error
    matched = set()
    for item in items:
        entry = quarantine.match(entries, item.nodeid)
        if entry is not None:
            matched.add(entry.test)
            if entry.expired(today):
                item.stash[EXPIRED] = entry
            else:
                reason = f"quarantine until {entry.until}: {entry.why}"
                item.add_marker(pytest.mark.xfail(reason=reason, strict=False))
                item.stash[QUARANTINED] = True
                item.user_properties.append(("quarantine", reason))
    if missing := _missing(config, [entry.test for entry in entries if entry.test not in matched], items):
        raise pytest.UsageError(f"{path}: no such test: {', '.join(missing)}; remove the entry or correct its name")


def _missing(config: pytest.Config, unmatched: list[str], items: list[pytest.Item]) -> list[str]:
    """Return quarantined tests that no longer exist: the file is gone, or was collected whole without the test."""
    collected = {item.nodeid.partition("::")[0] for item in items}
    is_filtered = config.getoption("keyword") or config.getoption("lf", default=False)
    is_whole = not is_filtered and not any("::" in argument for argument in config.args)
    files = {test: test.partition("::")[0] for test in unmatched}
    return [
        test
        for test, name in files.items()
        if not (config.rootpath / name).exists() or (is_whole and name in collected)
    ]


def _mark_experiments(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark experiments as `soft` or `lab` by the kind of the lab; an unknown lab is reported by the first test."""
    experiments = [item for item in items if _is_experiment(item)]
    if not experiments:
        return
    from faultbed.harness.pytest_plugin.session_lab import inventory_of
    from faultbed.testbed.model.lab_kind import traits_of

    with contextlib.suppress(FaultbedError):
        for item in experiments:
            item.add_marker("soft" if traits_of(inventory_of(config).kind).is_emulated else "lab")


def _is_experiment(item: pytest.Item) -> bool:
    """Return whether an item is an experiment, without loading the module of experiments for that."""
    items = sys.modules.get("faultbed.harness.pytest_plugin.items")
    return items is not None and isinstance(item, items.ExperimentItem)


def _reject_unknown_names(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Reject an unknown lab or need with one sentence before the first test.

    Raises:
        UsageError (pytest's): the lab or the need is unknown.
    """
    lab_tests = [item for item in items if uses_lab(item)]
    if not lab_tests:
        return
    from faultbed.harness.experiment.needs import parse_need
    from faultbed.harness.pytest_plugin.session_lab import inventory_of

    for item in lab_tests:
        try:
            inventory_of(config)
            for mark in item.iter_markers("needs"):
                tuple(map(parse_need, mark.args))
        except FaultbedError as error:
            raise pytest.UsageError(str(error)) from error
        except ValueError as error:
            raise pytest.UsageError(f"{item.nodeid}: {error}") from error


def _deselect_rounds(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect rounds after the N-th of slow tests for `--faultbed-repeat-slow N`."""
    max_rounds = config.getoption("--faultbed-repeat-slow")
    if max_rounds is None:
        return
    rounds = {item: getattr(item, "callspec", None) for item in items if item.get_closest_marker("slow")}
    surplus = {item for item, call in rounds.items() if call is not None and call.params.get("_round", 0) >= max_rounds}
    if surplus:
        config.hook.pytest_deselected(items=[item for item in items if item in surplus])
        items[:] = [item for item in items if item not in surplus]


def uses_lab(item: pytest.Item) -> bool:
    """Return whether an item is an experiment or uses the `lab` fixture of faultbed, not another one of that name.

    A fixture of a project that is named `lab` and takes `lab` extends the one of faultbed.
    """
    if _is_experiment(item):
        return True
    fixtures = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}  # noqa: SLF001
    for fixture in reversed(fixtures.get("lab", ())):
        if fixture.func.__module__ == __name__:
            return True
        if "lab" not in fixture.argnames:
            return False
    return False


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start a soft lab in the background if tests that do not need it come first."""
    _reject_unknown_names(session.config, session.items)
    config, lab_tests = session.config, [uses_lab(item) for item in session.items]
    if config.option.collectonly or not any(lab_tests) or lab_tests[0]:
        return
    from faultbed.harness.pytest_plugin.session_lab import prewarm

    with contextlib.suppress(FaultbedError):  # the first test that needs the lab reports it
        prewarm(config)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test whose quarantine has expired. A test that is rerun starts without what its last attempt left."""
    item.stash[BEGAN] = True
    item.stash[FAILED] = item.stash[ANY_FAILED] = item.stash[OPENED_LAB] = False
    item.stash[NOT_CLEARED], item.stash[NOT_STARTED], item.stash[RUNNING], item.stash[FAULTS] = (), [], [], []
    item.user_properties[:] = item.stash.setdefault(PROPERTIES, item.user_properties.copy())
    entry = item.stash.get(EXPIRED, None)
    if entry is not None:
        pytest.fail(
            f"its quarantine ended on {entry.until} ({entry.why}): fix the test, remove the entry, or give a new date",
            pytrace=False,
        )


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect an experiment that `faultbed_experiments` names, and no other TOML file."""
    if file_path.suffix != ".toml":
        return None
    resolved = file_path.resolve()
    if not any(resolved.is_relative_to(place) for place in parent.config.stash[EXPERIMENTS]):
        return None
    from faultbed.harness.pytest_plugin.items import ExperimentFile

    return ExperimentFile.from_parent(parent, path=file_path)


# Outermost: an interrupted session tears down its fixtures in this hook, and a teardown may fail (unproven fault).
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    """Close the lab even if a fixture's teardown fails. A session that tested nothing ends with 5.

    The JUnit file of an interrupted session has an error for each test that has not ended.
    """
    session.config.stash[AT_END] = []
    if session.exitstatus in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR):
        from faultbed.harness.pytest_plugin.interrupted_session import report_unfinished

        report_unfinished(session)
    report_to_controller(session.config, has_run=session.config.stash.get(RAN, False))
    try:
        yield
    finally:
        # A session that has not loaded the module has used no lab.
        if session_lab := sys.modules.get("faultbed.harness.pytest_plugin.session_lab"):
            session_lab.close_session(session.config)
    if _proved_nothing(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Count the tests of a worker of pytest-xdist that has ended."""
    if add_worker_reasons(node.config, getattr(node, "workeroutput", {})):
        node.config.stash[RAN] = True


def _proved_nothing(config: pytest.Config) -> bool:
    """Return whether tests were skipped because of the lab and no other test has run, which is not a pass."""
    return bool(reasons(config)) and not config.stash.get(RAN, False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Report tests that the lab does not fit, errors after an interruption, and faults without proof."""
    for line in summary_lines(config):
        terminalreporter.write_line(line)
    if _proved_nothing(config):
        terminalreporter.write_line(
            "tests that need the lab were skipped and no other test ran: this is not a pass", red=True
        )
    for error in config.stash.get(AT_END, []):
        terminalreporter.write_line(f"interrupted: {error}", red=True)
    if tests := config.stash.get(PROOF_NOT_REQUIRED, []):
        terminalreporter.write_line(f"faults that need not be proven (prove=False): {', '.join(tests)}", yellow=True)


def _skip_if_unmet(config: pytest.Config, marks: Iterable[pytest.Mark]) -> None:
    from faultbed.harness.pytest_plugin.session_lab import inventory_of

    inventory = inventory_of(config)
    for mark in marks:
        if reason := _misfit(mark, inventory):
            skip(config, reason)


def _misfit(mark: pytest.Mark, inventory: Inventory) -> str:
    """Return why the lab does not fit a test with this mark; empty if it does."""
    from faultbed.testbed.model.lab_kind import traits_of

    if mark.name == "lab" and traits_of(inventory.kind).is_emulated:
        return "needs a rack lab: --lab names its inventory"
    if mark.name == "soft" and not traits_of(inventory.kind).is_emulated:
        return "needs a soft lab: the test changes the VMs themselves"
    if mark.name == "gpu" and not any(gpu.kind != "soft" for host in inventory.topology.hosts for gpu in host.gpus):
        return "needs a real GPU"
    if mark.name == "needs":
        from faultbed.harness.experiment.needs import parse_need, unmet

        lacking = unmet(tuple(parse_need(text) for text in mark.args), inventory.topology)
        return f"{inventory.name} is not enough: {'; '.join(lacking)}" if lacking else ""
    return ""


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """Yield the lab in its baseline state, and compare it with that state after the test."""
    _skip_if_unmet(request.config, request.node.iter_markers())
    from faultbed.harness.pytest_plugin.fixtures import lab_of_test

    yield from lab_of_test(request)


def _leaves_dirty(error: BaseException) -> bool:
    """Return whether an error means that the lab is DIRTY or that its state is unknown."""
    return isinstance(error, (DirtyLab, RevertFailed)) or getattr(error, "lab_state", "CLEAN") != "CLEAN"


@pytest.fixture
def traffic(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Traffic]:
    """Yield an object that starts workloads on the lab."""
    from faultbed.harness.pytest_plugin.fixtures import workloads_on

    yield from workloads_on(lab, request)


@pytest.fixture
def fault_mutation() -> Mutation | None:
    """Return None. Tests override this fixture to make every fault a no-op, which the plugin must detect."""
    return None


@pytest.fixture
def inject(
    lab: Lab, tmp_path: Path, request: pytest.FixtureRequest, fault_mutation: Mutation | None
) -> Iterator[Inject]:
    """Yield a function that prepares faults on the lab (`faultbed.harness.pytest_plugin.fixtures.faults_on`)."""
    from faultbed.harness.pytest_plugin.fixtures import faults_on

    yield from faults_on(lab, tmp_path, request, fault_mutation)


# Outside pytest's own hook, which turns the failure of a test with the mark `xfail` into an expected failure.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the workloads of a failed test to its report. Neither quarantine nor xfail excuses a lab that is DIRTY."""
    report = yield
    excused = False
    if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
        excused = hasattr(report, "wasxfail")
        error = call.excinfo.value
        # An error at the end of a test may leave the lab changed, unless it says that the lab is clean.
        has_lab = item.stash.get(QUARANTINED, False) or uses_lab(item) or item.stash.get(OPENED_LAB, False)
        at_end = report.when == "teardown" and has_lab
        reports_clean = getattr(error, "lab_state", None) == "CLEAN"
        if excused and (_leaves_dirty(error) or (at_end and not reports_clean)):
            report.outcome = "failed"
            del report.wasxfail
    # The report of a subtest comes before that of its test. A subtest that is excused does not excuse the whole test.
    item.stash[ANY_FAILED] = item.stash.get(ANY_FAILED, False) or report.failed
    item.stash[FAILED] = item.stash[ANY_FAILED] or excused
    if report.when == "call" and not report.skipped:
        item.config.stash[RAN] = True
    if report.when == "call" and report.failed and (started := item.stash.get(RUNNING, [])):
        from faultbed.harness.pytest_plugin.failure_summary import summary_of

        report.sections += [("traffic", summary_of(workload)) for workload in started]
    item.stash[ENDED] = report.when == "teardown"
    if report.when == "teardown" and item.stash[FAILED]:
        _correct_exit_code(report)
    return report


def _correct_exit_code(report: pytest.TestReport) -> None:
    """Replace PASS as the exit code of a test that has failed: its receipts were judged before that, or alone."""
    if receipts := sys.modules.get("faultbed.harness.pytest_plugin.receipts"):
        report.user_properties[:] = receipts.without_pass(report.user_properties)


def __getattr__(name: str) -> Any:
    """Import `Inject` and `Traffic`, the types of the fixtures, on first use."""
    if name in ("Inject", "Traffic"):
        from faultbed.harness.pytest_plugin import fixtures

        return getattr(fixtures, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
