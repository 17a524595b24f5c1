"""faultbed in pytest: `--lab`, the fixtures `lab`, `traffic` and `inject`, and experiments as test items.

* Every test that takes `lab` starts with the fingerprint of the lab's snapshot and must leave it so: a difference is an
  error of that test, and marks the lab DIRTY: a rack takes no further test then. The lab is reset for the first test
  and after each failure, or for every test with `--reset-each`.
* Tests that need no lab come first; a soft lab that is down comes up meanwhile.
* Every `*.toml` file under a folder named `experiments` is an item: PASS passes, FAIL fails, and so do INCONCLUSIVE and
  ERROR, because neither shows anything. An experiment that the lab is too small for, or of the wrong kind for, is
  skipped, with the reason.
* A session that skipped for the lab's sake and ran nothing ends with 5: no tests. A lab or a need that is not known
  ends it at once, with 4.
* Quarantine excuses a failure, and never a lab that is DIRTY.
* Receipts (JSON) and checks go to JUnit properties, and `quarantine` to those of a test that is in it.

Markers: `soft` (a soft lab), `lab` (a rack), `gpu`, `needs("uplinks >= 2")`.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.experiment.needs import parse_need, unmet
from harness.plugin import quarantine
from harness.plugin.items import SKIPPED, ExperimentFile, ExperimentItem, leaves_dirty
from harness.plugin.session_lab import begin_ahead, inventory_of, keeper_of, leave, or_give_up
from harness.plugin.told import told
from inject.injector import Injector, Mutation, Prepared
from inject.journal import Journal
from inject.plan import FaultSpec, plan_beside
from testbed import fingerprint
from testbed.errors import FaultbedError
from testbed.inventory import Inventory
from testbed.lab import Lab
from traffic import collective as collective_module
from traffic import flow as flow_module
from traffic import job as job_module
from traffic.collective import CollectiveSpec
from traffic.flow import FlowSpec
from traffic.job import JobSpec
from traffic.run import Running

__all__ = ["Inject", "Traffic"]

_EXPIRED = pytest.StashKey[quarantine.Entry]()
_QUARANTINED = pytest.StashKey[bool]()
_FAILED = pytest.StashKey[bool]()
_TRAFFIC = pytest.StashKey[list[Running[Any]]]()
_RAN = pytest.StashKey[bool]()
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
        help="inventory of the lab, or the name of one that comes with faultbed (default: soft, or FAULTBED_LAB)",
    )
    group.addoption("--repeat", metavar="N", type=int, default=1, help="run every test that takes the lab N times")
    group.addoption(
        "--repeat-slow", metavar="N", type=int, help="those of them that are marked slow N times (default: as --repeat)"
    )
    group.addoption(
        "--reset-each", action="store_true", help="reset the lab before every test, not only after one that failed"
    )
    group.addoption(
        "--quarantine",
        metavar="FILE",
        default="tests/quarantine.toml",
        help="known flaky tests with the day on which each must be mended (harness/plugin/quarantine.py)",
    )
    group.addoption("--runs", metavar="DIR", default="runs", help="folder of run directories of experiments")


def pytest_configure(config: pytest.Config) -> None:
    """Our markers."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`--repeat N`: a test that takes the lab becomes N tests."""
    count = int(metafunc.config.getoption("--repeat"))
    if count > 1 and "lab" in metafunc.fixturenames:
        metafunc.fixturenames.append("_round")
        metafunc.parametrize("_round", range(count), ids=[f"round{number}" for number in range(count)])


@pytest.hookimpl(tryfirst=True)  # before `-m` and its like choose among all that was collected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests in quarantine may fail until their day is over; after it they fail."""
    _mark_experiments(config, items)
    path = config.rootpath / str(config.getoption("--quarantine"))
    today = dt.datetime.now(dt.UTC).date()
    _leave_rounds_out(config, items)
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
                item.stash[_EXPIRED] = entry
            else:
                reason = f"quarantine until {entry.until}: {entry.why}"
                item.add_marker(pytest.mark.xfail(reason=reason, strict=False))
                item.stash[_QUARANTINED] = True
                item.user_properties.append(("quarantine", reason))
    items.sort(key=_takes_lab)  # keeps the order otherwise
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
    experiments = [item for item in items if isinstance(item, ExperimentItem)]
    with contextlib.suppress(FaultbedError):
        for item in experiments:
            item.add_marker("soft" if inventory_of(config).kind == "soft" else "lab")


def _ask_what_is_known(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A lab that nobody knows, or a need, is one sentence before the first test, and no traceback of every test."""
    for item in filter(_takes_lab, items):
        try:
            inventory_of(config)
            for mark in item.iter_markers("needs"):
                tuple(map(parse_need, mark.args))
        except FaultbedError as error:
            raise pytest.UsageError(str(error)) from error
        except ValueError as error:
            raise pytest.UsageError(f"{item.nodeid}: {error}") from error


def _leave_rounds_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`--repeat-slow N`: what is marked slow, perhaps with some parameters only, has no more rounds than that."""
    most = config.getoption("--repeat-slow")
    if most is None:
        return
    rounds = {item: getattr(item, "callspec", None) for item in items if item.get_closest_marker("slow")}
    gone = {item for item, call in rounds.items() if call is not None and call.params.get("_round", 0) >= most}
    if gone:
        config.hook.pytest_deselected(items=[item for item in items if item in gone])
        items[:] = [item for item in items if item not in gone]


def _takes_lab(item: pytest.Item) -> bool:
    """Whether an item needs the lab: it is an experiment, or its `lab` is our fixture and not one of the same name."""
    if isinstance(item, ExperimentItem):
        return True
    fixtures = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}  # noqa: SLF001
    return "lab" in fixtures and fixtures["lab"][-1].func.__module__ == __name__


def pytest_collection_finish(session: pytest.Session) -> None:
    """A soft lab that will be needed later, and not at once, comes up from now on."""
    _ask_what_is_known(session.config, session.items)
    config, needs = session.config, [_takes_lab(item) for item in session.items]
    if config.option.collectonly or not any(needs) or needs[0]:
        return
    with contextlib.suppress(FaultbedError):  # the first test that needs the lab will tell
        begin_ahead(config)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test whose quarantine is over fails until somebody has looked at it."""
    entry = item.stash.get(_EXPIRED, None)
    if entry is not None:
        pytest.fail(
            f"its quarantine ended on {entry.until} ({entry.why}): mend it, remove it, or give a new day and reason",
            pytrace=False,
        )


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Experiments are items."""
    if file_path.suffix == ".toml" and file_path.parent.name == "experiments":
        return ExperimentFile.from_parent(parent, path=file_path)
    return None


# After the fixtures' own end, which an interrupted session leaves to the end of the session.
@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Leave the lab as it was found, and say where nothing was proved."""
    leave(session.config)
    if _proved_nothing(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def _proved_nothing(config: pytest.Config) -> bool:
    """Whether something was skipped for the lab's sake and nothing else has run: that must not look like a pass."""
    return config.stash.get(SKIPPED, False) and not config.stash.get(_RAN, False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what the exit code means."""
    if _proved_nothing(config):
        terminalreporter.write_line("what needs the lab was skipped and nothing else ran: that is no pass", red=True)


def _skip_if_unmet(config: pytest.Config, marks: Iterable[pytest.Mark]) -> None:
    inventory = inventory_of(config)
    for mark in marks:
        if reason := _unfit(mark, inventory):
            config.stash[SKIPPED] = True
            pytest.skip(reason)


def _unfit(mark: pytest.Mark, inventory: Inventory) -> str:
    """Why a lab is none for a test with this mark, or nothing."""
    if mark.name == "lab" and inventory.kind == "soft":
        return "needs a rack lab: --lab names its inventory"
    if mark.name == "soft" and inventory.kind != "soft":
        return "needs a soft lab: it takes the VMs themselves apart"
    if mark.name == "gpu" and not any(gpu.kind != "soft" for host in inventory.topology.hosts for gpu in host.gpus):
        return "needs a real GPU"
    if mark.name == "needs":
        lacking = unmet(tuple(parse_need(text) for text in mark.args), inventory.topology)
        return f"{inventory.name} is not enough: {'; '.join(lacking)}" if lacking else ""
    return ""


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """The lab, in its known state; compared with that state after the test."""
    config = request.config
    _skip_if_unmet(config, request.node.iter_markers())
    keeper = keeper_of(config)
    with or_give_up(config):
        keeper.refuse_dirty()
        before = keeper.into_known_state(always=config.getoption("--reset-each"))
    yield keeper.lab
    with or_give_up(config):
        try:
            left = fingerprint.settle(keeper.lab, before)
        except FaultbedError as error:  # nobody can tell
            keeper.mark([str(error)], before)
            raise
    if request.node.stash.get(_FAILED, False):
        keeper.distrust()
    if left:
        keeper.mark(left, before)
        request.node.user_properties.append(("lab_state", "DIRTY"))
        pytest.fail("the lab is not as the test found it:\n" + "\n".join(left), pytrace=False)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The `traffic` fixture: starts workloads, and ends those that a test leaves running."""

    lab: Lab
    _running: list[Running[Any]]

    def flow(self, src: str, dst: str, **spec: Any) -> Running[Any]:
        """Start a flow (`traffic.flow.FlowSpec`)."""
        return self._keep(flow_module.start(self.lab, FlowSpec(src=src, dst=dst, **spec)))

    def collective(self, **spec: Any) -> Running[Any]:
        """Start a collective (`traffic.collective.CollectiveSpec`)."""
        return self._keep(collective_module.start(self.lab, CollectiveSpec(**spec)))

    def job(self, **spec: Any) -> Running[Any]:
        """Start a training job (`traffic.job.JobSpec`)."""
        return self._keep(job_module.start(self.lab, JobSpec(**spec)))

    def _keep(self, running: Running[Any]) -> Running[Any]:
        self._running.append(running)
        return running


# Outside pytest's own, which makes an excused failure of one of a test in quarantine.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that failed tells what its workloads have done. No quarantine excuses what it has left behind."""
    report = yield
    if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
        item.stash[_FAILED] = True
        excused = item.stash.get(_QUARANTINED, False) and hasattr(report, "wasxfail")
        if excused and (report.when == "teardown" or leaves_dirty(call.excinfo.value)):
            report.outcome = "failed"
            del report.wasxfail
    if report.when == "call" and not report.skipped:
        item.config.stash[_RAN] = True
    if report.when == "call" and report.failed:
        report.sections += [("traffic", told(one)) for one in item.stash.get(_TRAFFIC, ())]
    return report


@pytest.fixture
def traffic(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Traffic]:
    """Workloads on the lab."""
    running: list[Running[Any]] = []
    request.node.stash[_TRAFFIC] = running
    yield Traffic(lab=lab, _running=running)
    for one in running:
        if not one.is_over:
            one.abort("the test is over")
            one.wait(30.0)


Inject = Callable[..., Prepared]
"""`inject(kind, target, for_s=…, **params)` gives a prepared fault: `arm()`, `observe()`, `clear()`."""


@pytest.fixture
def fault_mutation() -> Mutation | None:
    """Override to replace every fault's action by nothing, for tests that prove that this is noticed."""
    return None


@pytest.fixture
def inject(
    lab: Lab, tmp_path: Path, request: pytest.FixtureRequest, fault_mutation: Mutation | None
) -> Iterator[Inject]:
    """Faults on the lab; what a test does not clear is cleared for it. Receipts go to JUnit properties.

    Faults that are there together are planned together: one that would change what another one changes is refused.
    """
    made: list[Prepared] = []
    with Journal(tmp_path / "journal.jsonl") as journal, Injector(lab, journal, mutate=fault_mutation) as injector:

        def prepare(kind: str, target: str, *, for_s: float = 60.0, **params: Any) -> Prepared:
            spec = FaultSpec(kind=kind, target=target, for_s=for_s, params=params)
            active = injector.active()
            *before, planned = plan_beside(
                spec, [each.planned for each in active], lab.topology, lab_kind=lab.kind, index=len(made)
            )
            made.append(injector.prepare(planned))
            # What the new one moves on purpose no longer speaks against those that are there.
            for each, anew in zip(active, before, strict=True):
                each.planned = anew
            return made[-1]

        yield prepare
        for prepared in made:
            receipt = prepared.clear()
            request.node.user_properties.append((f"receipt.{receipt.id}", json.dumps(receipt.to_json(), default=str)))
