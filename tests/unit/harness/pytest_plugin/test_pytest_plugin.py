"""The pytest plugin when its lab fails, is lost, differs, or does not fit."""

import datetime as dt
import json
import os
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest

from faultbed.harness.pytest_plugin import fixtures as plugin_fixtures
from faultbed.harness.pytest_plugin import hooks as plugin
from faultbed.harness.pytest_plugin import items as plugin_items
from faultbed.harness.pytest_plugin import receipts
from faultbed.harness.pytest_plugin import session_lab as pytest_lab
from faultbed.harness.verdict import Verdict, VerdictFile
from faultbed.inject.evidence.receipt import Armed, Cleared, Fired, Receipt
from faultbed.testbed.errors import Unreachable, UsageError
from faultbed.testbed.observe import fingerprint
from faultbed.testbed.tenancy import dirty, in_progress
from faultbed.testbed.tenancy.lab_lease import INHERITED, store_of

pytest_plugins = ["pytester"]


def test_plugin_fixture_merely_named_lab_brings_no_lab_up(pytester):
    """Unit tests with a stand-in named `lab` used to boot five VMs that no test used."""
    pytester.makepyfile(test_own="import pytest\n@pytest.fixture\ndef lab(): ...\ndef test_own(lab): ...\n")
    pytester.makepyfile(test_ours="def test_ours(lab): ...\ndef test_injects(inject): ...\ndef test_pure(): ...\n")
    items, _ = pytester.inline_genitems()
    takes = {item.name: plugin.uses_lab(item) for item in items}
    assert takes == {"test_own": False, "test_ours": True, "test_injects": True, "test_pure": False}


SLOW = """
import pytest

@pytest.mark.slow
def test_slow(lab): ...

@pytest.mark.parametrize("name", ["easy", pytest.param("hard", marks=pytest.mark.slow)])
def test_both(lab, name): ...

@pytest.mark.slow
def test_pure(): ...
"""


@pytest.mark.parametrize(
    ("options", "slow", "quick", "pure"),
    [
        ((), 1, 1, 1),
        (("--faultbed-repeat=3",), 3, 3, 1),
        (("--faultbed-repeat=3", "--faultbed-repeat-slow=1"), 1, 3, 1),
    ],
    ids=["once", "repeated", "slow-ones-once"],
)
def test_plugin_repeats_tests_that_use_the_lab_and_slow_ones_less_often(pytester, options, slow, quick, pure):
    pytester.makepyfile(test_slow=SLOW)
    reported = pytester.runpytest_inprocess("-q", "--collect-only", "-m", "", *options).outlines
    names = [line.partition("::")[2] for line in reported if "::" in line]
    actual = {
        "slow": sum(name.startswith("test_slow") for name in names),
        "hard": sum("hard" in name for name in names),
        "quick": sum("easy" in name for name in names),
        "pure": names.count("test_pure"),
    }
    assert actual == {"slow": slow, "hard": slow, "quick": quick, "pure": pure}


def test_plugin_lost_lab_is_reopened_by_the_next_test(monkeypatch):
    """A lab that comes back may have other ports. Without reopening it, 29 tests once ran against the old ports."""
    opened = []

    def open_lab(inventory):
        opened.append(SimpleNamespace(closed=False, close=lambda: None))
        return opened[-1]

    monkeypatch.setattr(pytest_lab, "ensure_lab_up", lambda config: None)
    monkeypatch.setattr(pytest_lab, "acquire_lease", lambda config: None)
    monkeypatch.setattr(pytest_lab, "open_lab", open_lab)
    config = SimpleNamespace(stash=pytest.Stash())
    assert pytest_lab.open_session_lab(config).lab is pytest_lab.open_session_lab(config).lab is opened[0]
    with pytest.raises(Unreachable), pytest_lab.closing_after_error(config):
        raise Unreachable("host1 does not answer")
    assert pytest_lab.open_session_lab(config).lab is opened[1]
    with pytest_lab.closing_after_error(config):
        pass
    assert pytest_lab.open_session_lab(config).lab is opened[1]


THROTTLES = """
import pytest
from pathlib import Path
from types import SimpleNamespace
from faultbed.harness.pytest_plugin import fixtures
from faultbed.inject.evidence.receipt import Armed, Cleared, Receipt, Fired
from faultbed.testbed.inventory import lab_inventory as inventory
from faultbed.testbed.errors import UsageError
from faultbed.testbed.shipped import inventories


class Stand:
    def __init__(self, lab, journal, *, mutate=None):
        self.open = []

    def __enter__(self):
        return self

    def __exit__(self, *error): ...

    def active(self):
        return tuple(self.open)

    def prepare(self, planned, *, until_cleared):
        receipt = Receipt(
            id=planned.id, kind=planned.kind, target=planned.target.text, fidelity=planned.fidelity,
            armed=Armed(ok=True), cleared=Cleared(ok=True),
            fired=Fired(count=1, first_ns=1, last_ns=1, witness="w", must_move={"w": 1}, must_not_move={}),
        )
        prepared = SimpleNamespace(planned=planned)
        prepared.clear = lambda: prepared in self.open and self.open.remove(prepared) or receipt
        self.open.append(prepared)
        return prepared


@pytest.fixture
def lab(monkeypatch):
    monkeypatch.setattr(fixtures, "Injector", Stand)
    return SimpleNamespace(topology=inventory.load(inventories() / "soft.yml").topology, kind="soft")


def test_two(inject):
    one, two = (inject("gpu.throttle", f"host{n}:gpu0", percent=50) for n in (1, 2))
    others = ("host3/gpu0.nr_throttled", "host4/gpu0.nr_throttled")
    assert one.planned.mechanism.must_not_move == two.planned.mechanism.must_not_move == others
    with pytest.raises(UsageError, match="gpu.thermal on host2:gpu0 conflicts with gpu.throttle on host2:gpu0"):
        inject("gpu.thermal", "host2:gpu0")
    two.clear()
    assert "host2/gpu0.nr_throttled" not in one.planned.mechanism.must_not_move
    three = inject("gpu.thermal", "host2:gpu0")
    assert three.planned.mechanism.must_not_move == others
"""


def test_plugin_plans_the_faults_of_one_test_together(pytester):
    """Planned apart, each of two throttled GPUs was the other's bystander, and neither fault was proven."""
    pytester.makepyfile(test_throttles=THROTTLES)
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


REFUSED = """
from pathlib import Path
from types import SimpleNamespace

import pytest

from faultbed.inject.policy.safety import Forbidden
from faultbed.testbed.inventory import lab_inventory as inventory
from faultbed.testbed.shipped import inventories


@pytest.fixture
def lab(monkeypatch, tmp_path):
    found = inventory.load(inventories() / "rack-h100.example.yml")
    stand = SimpleNamespace(topology=found.topology, kind="rack", name="r", inventory_model=found, state_dir=tmp_path)
    return stand


def test_no_way_to_do_it(inject):
    inject("packet.drop", "rnic[0]", share=0.1)


def test_not_allowed(inject):
    inject("link.flap", "uplink[0]", for_s=1.0)
"""


def test_inject_of_a_fault_that_a_rack_refuses_skips_the_test(pytester):
    """The test may run on both kinds of lab. If its fault is unsupported or forbidden there, it has shown nothing."""
    pytester.makepyfile(test_refused=REFUSED)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-rs")
    result.assert_outcomes(skipped=2)
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(["*r: fault: not supported on this lab: an ACL *", "*does not allow rtsw1:*"])


@pytest.fixture(autouse=True)
def no_lab_ahead(monkeypatch):
    """Inner sessions neither bring a lab up nor end this session's lab."""
    monkeypatch.setattr(pytest_lab, "prewarm", lambda _config: None)


CLEAN = fingerprint.Fingerprint(nodes={"host1": {"link mlx5_0": "UP"}})
DEBRIS = fingerprint.Fingerprint(nodes={"host1": {"link mlx5_0": "down"}})


@pytest.fixture
def rack(monkeypatch, tmp_path):
    """A rack whose fingerprint is `rack.now`, with a state folder that does not exist yet."""
    state = SimpleNamespace(now=CLEAN, folder=tmp_path / "state", resets=0, kernel=[])

    def kernel_log(_machine):
        if isinstance(state.kernel, str):
            raise Unreachable(state.kernel)
        messages, state.kernel = state.kernel, []
        return messages

    lab = SimpleNamespace(
        kind="rack", name="r", state_dir=state.folder, forget_connections=lambda: None, close=lambda: None,
        nodes=lambda: ("host1",), kernel_log=kernel_log, reserved=("*",),
        inventory_model=SimpleNamespace(ignored_messages=()),
    )  # fmt: skip
    state.session_lab = pytest_lab.SessionLab(lab=lab)

    def look(lab):
        if state.now is None:
            raise Unreachable("host1 does not answer")
        return state.now

    monkeypatch.setattr(fingerprint, "capture", look)
    monkeypatch.setattr(fingerprint, "settle", lambda lab, before, **_: fingerprint.diff(before, look(lab)))
    for module in (plugin_fixtures, plugin_items):
        monkeypatch.setattr(module, "open_session_lab", lambda config: state.session_lab)
    plugin.rack_of_this_test = state
    yield state
    state.session_lab.remove_session_mark()
    del plugin.rack_of_this_test


def on_rack(pytester, *argv):
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", "--lab=rack-h100.example", *argv)


WARNS = """
from faultbed.harness.pytest_plugin import hooks

def test_warns(lab):
    hooks.rack_of_this_test.kernel.append("4 WARNING: CPU: 0 PID: 7 at drivers/net/x.c:1")

def test_next(lab): ...
"""


def test_plugin_kernel_warning_is_an_error_of_the_test_during_which_it_came(pytester, rack):
    rack.kernel.append("4 WARNING: CPU: 0 PID: 7 at before.c:1")
    pytester.makepyfile(test_x=WARNS)
    result = on_rack(pytester)
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(
        ["*ERROR at teardown of test_warns*", "host1: kernel: WARNING: CPU: 0 PID: 7 at drivers/net/x.c:1"]
    )
    assert "before.c" not in result.stdout.str()
    assert result.ret == pytest.ExitCode.TESTS_FAILED


UNREADABLE = """
from faultbed.harness.pytest_plugin import hooks

def test_unreadable(lab):
    hooks.rack_of_this_test.kernel = "host1: [Errno 1] Operation not permitted: '/dev/kmsg'"
"""


def test_plugin_test_whose_kernel_logs_cannot_be_read_is_inconclusive(pytester, rack):
    """Such a test used to pass, as if the kernels had reported nothing."""
    pytester.makepyfile(test_x=UNREADABLE)
    result = on_rack(pytester)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*INCONCLUSIVE: it is unknown whether a kernel reported a problem:*"])
    result.stdout.fnmatch_lines(["host1: its kernel log could not be read: *Operation not permitted*"])


LEAVES = """
from faultbed.harness.pytest_plugin import hooks
from faultbed.testbed.observe.fingerprint import Fingerprint

def test_leaves(lab):
    state = hooks.rack_of_this_test
    state.now = {debris}

def test_after(lab): ...
"""


@pytest.mark.parametrize("debris", ["Fingerprint(nodes={'host1': {'link mlx5_0': 'down'}})", "None"])
def test_plugin_rack_left_dirty_by_a_test_takes_no_further_test(pytester, rack, debris):
    """The next test used to take leftovers as its baseline and pass, so they stayed unreported."""
    pytester.makepyfile(test_x=LEAVES.format(debris=debris))
    result = on_rack(pytester)
    result.assert_outcomes(passed=1, errors=2)
    result.stdout.fnmatch_lines(["*r is DIRTY and refuses work*"])
    assert dirty.baseline(rack.folder) == CLEAN


@pytest.mark.parametrize(("left", "outcomes"), [(CLEAN, {"passed": 1}), (DEBRIS, {"errors": 1})])
def test_session_after_a_killed_one_compares_the_rack_with_the_earlier_baseline(pytester, rack, left, outcomes):
    """Leftovers of the killed session must not become the baseline of the next session."""
    killed = in_progress.write(rack.folder, why="pytest", before=CLEAN, lease_s=0.0)
    killed.abandon()
    rack.now = left
    pytester.makepyfile(test_x="def test_it(lab): ...")
    on_rack(pytester).assert_outcomes(**outcomes)
    assert dirty.is_marked(rack.folder) == (left is DEBRIS)


def test_session_has_a_running_mark_until_it_ends(pytester, rack):
    pytester.makepyfile(
        test_x="""
from faultbed.harness.pytest_plugin import hooks
from faultbed.testbed.tenancy import in_progress

def test_it(lab):
    assert [one.why for one in in_progress.live(lab.state_dir)] == ["pytest"]
"""
    )
    on_rack(pytester).assert_outcomes(passed=1)
    rack.session_lab.remove_session_mark()
    assert dirty.unfinished(rack.folder) == ()


def test_session_whose_last_test_was_cut_off_leaves_the_comparison_to_the_next_command(rack):
    rack.session_lab.reset_if_needed(force=False)
    rack.session_lab.end_state_verified = False
    rack.session_lab.remove_session_mark()
    assert "the next command compares the lab first" in dirty.unfinished(rack.folder)[0]


def test_comparison_after_a_test_that_fails_for_any_reason_marks_the_rack_dirty(pytester, rack, monkeypatch):
    def broken(*_, **__):
        raise ValueError("no such subject")

    monkeypatch.setattr(fingerprint, "settle", broken)
    pytester.makepyfile(test_x="def test_it(lab): ...")
    on_rack(pytester).assert_outcomes(passed=1, errors=1)
    assert dirty.reasons(rack.folder) == ("could not compare: no such subject",)


def test_plugin_dirty_rack_takes_no_test(pytester, rack):
    dirty.mark(rack.folder, ["rtsw1: port is down"], CLEAN)
    pytester.makepyfile(test_x="def test_one(lab): ...\n")
    on_rack(pytester).assert_outcomes(errors=1)


def quarantine(pytester, *tests):
    day = dt.datetime.now(dt.UTC).date()
    pytester.makefile(
        ".toml", q="".join(f'[[quarantine]]\ntest = "{test}"\nwhy = "w"\nuntil = {day}\n' for test in tests)
    )
    return "--faultbed-quarantine=q.toml"


def test_quarantine_does_not_hide_a_dirty_lab(pytester, rack):
    """pytest's xfail covers a test's teardown too: the session used to be green although the lab had changed."""
    pytester.makepyfile(test_x=LEAVES.format(debris="Fingerprint(nodes={})").partition("def test_after")[0])
    result = on_rack(pytester, quarantine(pytester, "test_x.py::test_leaves"))
    result.assert_outcomes(xpassed=1, errors=1)
    assert result.ret == 1


@pytest.mark.parametrize("mark", ["xfail", "xfail(raises=AssertionError)"])
def test_xfail_does_not_hide_a_dirty_lab(pytester, rack, mark):
    text = LEAVES.format(debris="Fingerprint(nodes={})").partition("def test_after")[0]
    text = text.replace("def test_leaves", f"@pytest.mark.{mark}\ndef test_leaves")
    pytester.makepyfile(test_x=f"import pytest\n{text}")
    result = on_rack(pytester)
    result.assert_outcomes(xpassed=1, errors=1)
    assert result.ret == 1


OVERRIDES = """
@pytest.fixture
def lab(lab):
    yield lab

"""


def test_plugin_project_fixture_that_extends_lab_still_uses_the_lab(pytester):
    """Such a test used to count as one without a lab: it came first, and an unknown lab was not reported before it."""
    pytester.makepyfile(test_x=f"import pytest\n{OVERRIDES}def test_it(lab): ...\n")
    items, _ = pytester.inline_genitems()
    assert [plugin.uses_lab(item) for item in items] == [True]


@pytest.mark.parametrize(
    ("before", "arguments", "first"),
    [(OVERRIDES, "lab", ""), ("", "request", "    request.getfixturevalue('lab')\n")],
    ids=["extended", "by-name"],
)
def test_xfail_does_not_hide_a_dirty_lab_that_a_test_takes_indirectly(pytester, rack, before, arguments, first):
    """The session used to be green: only a test that took faultbed's own fixture by argument was watched."""
    text = LEAVES.format(debris="Fingerprint(nodes={})").partition("def test_after")[0]
    text = text.replace("def test_leaves(lab):\n", f"@pytest.mark.xfail\ndef test_leaves({arguments}):\n{first}")
    pytester.makepyfile(test_x=f"import pytest\n{before}{text}")
    result = on_rack(pytester)
    result.assert_outcomes(xpassed=1, errors=1)
    assert result.ret == 1


ENDS = """
import pytest
from faultbed.harness.pytest_plugin import hooks, receipts
from faultbed.testbed.observe.fingerprint import Fingerprint

@pytest.fixture
def proven(lab, request):
    yield
    receipts.conclude(request.node, [], None)

@pytest.fixture
def early(lab):
    yield
    assert False

def test_passes(proven): ...

def test_fails(proven):
    assert False

@pytest.mark.xfail
def test_expected(proven):
    assert False

def test_teardown(early, proven): ...

def test_kernel(proven):
    hooks.rack_of_this_test.kernel.append("4 WARNING: CPU: 0 PID: 7 at drivers/net/x.c:1")

def test_dirty(proven):
    hooks.rack_of_this_test.now = Fingerprint(nodes={})
"""


def test_plugin_exit_code_in_junit_is_that_of_the_whole_test(pytester, rack):
    """The exit code was that of the receipts alone: 0 for a failed test, and for one that left the lab DIRTY."""
    pytester.makepyfile(test_x=ENDS)
    on_rack(pytester, "--junitxml=j.xml").assert_outcomes(passed=4, failed=1, xfailed=1, errors=3)
    codes = {
        case.get("name"): [one.get("value") for one in case.iter("property") if one.get("name") == receipts.EXIT_CODE]
        for case in ET.parse(pytester.path / "j.xml").iter("testcase")
    }
    assert codes == {
        "test_passes": ["0"], "test_fails": ["1"], "test_expected": ["1"], "test_teardown": ["1"],
        "test_kernel": ["3"], "test_dirty": ["5"],
    }  # fmt: skip


def test_xfail_of_a_test_without_a_lab_is_none_of_the_plugins_business(pytester):
    text = "@pytest.fixture\ndef broken():\n    yield\n    assert False\n@pytest.mark.xfail\ndef test_it(broken): ...\n"
    pytester.makepyfile(test_x=f"import pytest\n{text}")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(xpassed=1, xfailed=1)
    assert result.ret == 0


def test_quarantine_failed_test_restores_the_lab_like_any_other(pytester, rack):
    pytester.makepyfile(test_x="def test_flaky(lab): assert False\n")
    result = on_rack(pytester, quarantine(pytester, "test_x.py::test_flaky"))
    result.assert_outcomes(xfailed=1)
    assert result.ret == 0
    assert rack.session_lab.baseline is None


def asked_for_experiments(pytester):
    """Make a folder whose TOML files are experiments by the project's configuration."""
    pytester.makeini("[pytest]\nfaultbed_experiments = experiments\n")
    return pytester.mkdir("experiments")


def a_verdict(word, state):
    fired = Fired(count=1, first_ns=1, last_ns=2, witness="w", must_move={"a": 1}, must_not_move={})
    receipt = Receipt(
        id="f0",
        kind="link.flap",
        target="x",
        fidelity="real",
        armed=Armed(ok=True),
        fired=fired,
        cleared=Cleared(ok=False),
    )
    return VerdictFile(
        experiment="e", seed=1, lab="r", verdict=Verdict(word), checks=(), faults=(receipt,), lab_state=state
    )


@pytest.fixture
def experiment(pytester, rack, monkeypatch):
    """Replace the run of an experiment by a verdict, so that the session needs no lab."""
    asked_for_experiments(pytester).joinpath("e.toml").write_text("")

    def comes_to(word, state="CLEAN"):
        finished = SimpleNamespace(verdict=a_verdict(word, state), report="r")
        monkeypatch.setattr(plugin_items, "acquire_lease", lambda config: SimpleNamespace(refresh=lambda: None))
        monkeypatch.setattr(plugin_items.experiment_module, "load", lambda path: None)
        monkeypatch.setattr(plugin_items.run_module, "resolve", lambda *_: None)
        monkeypatch.setattr(plugin_items.run_module, "refusal", lambda *_: None)
        monkeypatch.setattr(plugin_items.run_module, "execute", lambda *_, **__: finished)

    return comes_to


def test_quarantine_experiment_may_fail_and_not_leave_debris(pytester, experiment):
    option = quarantine(pytester, "experiments/e.toml::e")
    experiment("FAIL")
    assert on_rack(pytester, option).ret == 0
    experiment("FAIL", "DIRTY")
    result = on_rack(pytester, option)
    result.assert_outcomes(failed=1)
    assert result.ret == 1


def test_experiment_that_the_owner_of_a_lab_forbids_is_skipped(pytester, experiment, monkeypatch):
    experiment("PASS")
    monkeypatch.setattr(plugin_items.run_module, "refusal", lambda *_: "r does not allow host3 to be disrupted")
    result = on_rack(pytester, "-rs")
    result.assert_outcomes(skipped=1)
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(["*does not allow host3 to be disrupted*"])


def test_plugin_selects_experiments_by_the_kind_of_lab(pytester, experiment):
    experiment("PASS")
    on_rack(pytester, "-m", "lab").assert_outcomes(passed=1)
    on_rack(pytester, "-m", "soft").assert_outcomes(deselected=1)


def test_experiments_are_repeated_like_tests(pytester, experiment):
    """`make rack-soak` used to run every experiment only once."""
    experiment("PASS")
    on_rack(pytester, "--faultbed-repeat=3").assert_outcomes(passed=3)
    on_rack(pytester).assert_outcomes(passed=1)
    assert on_rack(pytester, "--faultbed-repeat=3", quarantine(pytester, "experiments/e.toml::e")).ret == 0


def test_junit_has_receipts_that_a_program_can_read(pytester, experiment):
    experiment("PASS")
    on_rack(pytester, "--junitxml=j.xml")
    actual = {one.get("name"): one.get("value") for one in ET.parse(pytester.path / "j.xml").iter("property")}
    assert actual["verdict"] == "PASS"
    assert json.loads(actual["receipt.f0"])["fired"]["must_move"] == {"a": 1}


def test_quarantine_is_in_junit_for_a_passing_test_too(pytester, rack):
    pytester.makepyfile(test_x="def test_mended(): ...\n")
    on_rack(pytester, quarantine(pytester, "test_x.py::test_mended"), "--junitxml=j.xml")
    (reported,) = ET.parse(pytester.path / "j.xml").iter("property")
    assert reported.get("name") == "quarantine"


NEEDY = """
import pytest

@pytest.mark.needs("{need}")
def test_wide(lab): ...
"""


@pytest.mark.parametrize(
    ("option", "need", "message"),
    [
        ("--lab=nosuch", "rdma", 'no inventory "nosuch"*soft-mini*'),
        ("--lab=soft", "uplinkz >= 2", 'test_x.py::test_wide: no need "uplinkz >= 2"*uplinks*'),
    ],
)
def test_plugin_unknown_lab_or_need_is_one_sentence_before_the_first_test(pytester, option, need, message):
    """This used to be a traceback of sixty lines for every test that uses the lab, and the other tests ran."""
    pytester.makepyfile(test_x=NEEDY.format(need=need) + "def test_pure(): ...\n")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {message}"])
    result.assert_outcomes()


def test_plugin_unknown_lab_does_not_disturb_tests_without_a_lab(pytester):
    pytester.makepyfile(test_x="def test_pure(): ...\n")
    assert pytester.runpytest_inprocess("-p", "no:cacheprovider", "--lab=nosuch").ret == 0
    pytester.makepyfile(test_y="def test_takes(lab): ...\n")
    asked_for_experiments(pytester).joinpath("e.toml").write_text("")
    assert pytester.runpytest_inprocess("-p", "no:cacheprovider", "--lab=nosuch", "-k", "pure").ret == 0


def test_plugin_session_that_only_skipped_is_no_pass(pytester):
    """A pipeline whose lab fits none of its tests used to be green."""
    pytester.makepyfile(test_x=NEEDY.format(need="uplinks >= 200"))
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--lab=soft")
    result.assert_outcomes(skipped=1)
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(["*this is not a pass*"])
    pytester.makepyfile(test_y="def test_pure(): ...\n")
    assert pytester.runpytest_inprocess("-p", "no:cacheprovider", "--lab=soft").ret == 0


@pytest.mark.process
def test_session_of_workers_that_only_skipped_is_no_pass(pytester):
    """The controller of pytest-xdist does not see why its workers skip, and used to be green."""
    pytester.makepyfile(test_x=NEEDY.format(need="uplinks >= 200"))
    options = ("-p", "no:cacheprovider", "--lab=soft", "-n", "1")
    result = pytester.runpytest_subprocess(*options)
    result.assert_outcomes(skipped=1)
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(["1 test was skipped because the lab does not fit:", "*this is not a pass*"])
    pytester.makepyfile(test_y="def test_pure(): ...\n")
    assert pytester.runpytest_subprocess(*options).ret == 0


def test_session_that_skips_for_the_lab_counts_the_reasons(pytester):
    """On a rack a third of the tests may be skipped, perhaps for one reason, which a line of dots and S hides."""
    need = NEEDY.format(need="uplinks >= 200")
    pytester.makepyfile(test_x=need + need.replace("test_wide", "test_wider") + "def test_pure(): ...\n")
    pytester.makepyfile(test_y=NEEDY.format(need="hosts >= 300"))
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--lab=soft")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "3 tests were skipped because the lab does not fit:",
            "  2 x soft is not enough: needs uplinks >= 200; this lab has 2",
            "  1 x soft is not enough: needs hosts >= 300; this lab has 4",
        ]
    )
    assert "skipped because" not in pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", "pure").stdout.str()


def test_nested_session_leaves_the_outer_sessions_lease_to_its_programs(monkeypatch, tmp_path):
    """After a nested pytest session, programs that the outer session's tests started used to be refused the lab."""
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path))
    monkeypatch.setenv(INHERITED, "outer")
    config = SimpleNamespace(stash=pytest.Stash(), getoption=lambda _name: "soft")
    token = pytest_lab.acquire_lease(config).token
    assert os.environ[INHERITED] == token != "outer"
    pytest_lab.close_session(config)
    assert os.environ[INHERITED] == "outer"


def test_plugin_refuses_one_lab_for_several_processes():
    config = SimpleNamespace(stash=pytest.Stash(), workerinput={})
    with pytest.raises(UsageError, match="run without -n"):
        pytest_lab.acquire_lease(config)


def test_plugin_without_configured_experiments_leaves_toml_files_alone(pytester):
    """`experiments/*.toml` of an unrelated project were once collected, and failed as faultbed's experiments."""
    (pytester.mkdir("experiments") / "sweep.toml").write_text("learning_rate = [0.1, 0.01]\n")
    pytester.makepyfile(test_x="def test_pure(): ...\n")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
    assert result.ret == 0


@pytest.mark.parametrize(
    ("configured", "collected"),
    [
        ("mine", {"a", "deep"}),
        ("mine/a.toml", {"a"}),
        ("mine/deeper other", {"deep", "o"}),
        ("other/../mine/deeper", {"deep"}),
        ("", set()),
    ],
)
def test_plugin_collects_experiments_of_configured_files_and_folders(pytester, configured, collected):
    pytester.makeini(f"[pytest]\nfaultbed_experiments = {configured}\n")
    for name in ("mine/a.toml", "mine/deeper/deep.toml", "other/o.toml", "experiments/e.toml"):
        path = pytester.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    items, _ = pytester.inline_genitems()
    assert {item.name for item in items} == collected


def test_plugin_refuses_configured_experiments_that_do_not_exist(pytester):
    """Otherwise renaming a folder would silently remove its experiments from the suite."""
    pytester.makeini("[pytest]\nfaultbed_experiments = renamed\n")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: faultbed_experiments: no file or folder *renamed; correct the path or *"])


MODULES = """
import sys

def pytest_unconfigure(config):
    with open("modules.txt", "w") as file:
        print(*sorted(sys.modules), file=file)
"""


@pytest.mark.process
def test_plugin_loads_nothing_of_the_product_without_lab_tests(pytester):
    """Otherwise every pytest session of a project with faultbed installed would spend a second of CPU on imports."""
    pytester.makeconftest(MODULES)
    pytester.makepyfile(test_x="def test_pure(): ...\n")
    (pytester.mkdir("experiments") / "sweep.toml").write_text("")
    loaded = []
    for options in ((), ("-p", "no:faultbed")):
        assert pytester.runpytest_subprocess("-p", "no:cacheprovider", *options).ret == 0
        loaded.append(set((pytester.path / "modules.txt").read_text().split()))
    ours = {
        "faultbed",
        "faultbed.harness",
        "faultbed.harness.pytest_plugin",
        "faultbed.harness.pytest_plugin.hooks",
        "faultbed.harness.pytest_plugin.keys",
        "faultbed.harness.pytest_plugin.skips",
        "faultbed.testbed",
        "faultbed.testbed.errors",
    }
    assert loaded[0] - loaded[1] == ours


def test_plugin_types_of_fixtures_can_be_imported():
    assert plugin.Traffic is plugin_fixtures.Traffic
    assert plugin.Inject is plugin_fixtures.Inject
    with pytest.raises(AttributeError, match="Injector"):
        _ = plugin.Injector


def test_plugin_options_carry_its_prefix():
    """Other plugins also have `--repeat` and `--runs`; two plugins with one option name end every session."""
    parser = pytest.Parser(_ispytest=True)
    plugin.pytest_addoption(parser)
    names = {name for group in parser._groups for option in group.options for name in option.names()}
    assert names
    assert all(name.startswith("--faultbed-") for name in names)  # --lab comes last (test_lab_option.py)
    assert all(name.startswith("faultbed_") for name in parser._inidict)


INTERRUPTED = """
import pytest

@pytest.fixture
def unproven():
    yield
    raise RuntimeError("not proven")

def test_stopped(unproven):
    raise KeyboardInterrupt
"""


def test_plugin_interrupted_session_ends_its_lab_although_a_fixture_fails(pytester, monkeypatch):
    """After Ctrl-C during a fault, the fixture fails as not proven. Five VMs used to keep running after the session."""
    left = []
    monkeypatch.setattr(pytest_lab, "close_session", left.append)
    pytester.makepyfile(test_x=INTERRUPTED)
    pytester.runpytest_inprocess("-p", "no:cacheprovider")
    assert len(left) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("failing", ["stop", "mark", "close", "down"])
def test_close_session_with_one_failed_step_takes_all_other_steps(monkeypatch, tmp_path, failing, error):
    """A second Ctrl-C while the lab went down used to leave the lease, and its token in the environment."""
    monkeypatch.setenv("FAULTBED_HOME", str(tmp_path))
    monkeypatch.setenv(INHERITED, "outer")
    config = SimpleNamespace(stash=pytest.Stash(), getoption=lambda _name: "soft")
    lease = pytest_lab.acquire_lease(config)
    taken = []

    def step(name):
        taken.append(name)
        if name == failing:
            raise error(name)

    config.stash[pytest_lab._PREWARM] = SimpleNamespace(stop=lambda: step("stop"))
    config.stash[pytest_lab._SESSION_LAB] = SimpleNamespace(
        lab=SimpleNamespace(close=lambda: step("close")), remove_session_mark=lambda: step("mark")
    )
    monkeypatch.setattr("faultbed.testbed.backends.soft.lifecycle.down", lambda _inventory: step("down"))
    with pytest.raises(error, match=failing):
        pytest_lab.close_session(config)
    assert taken == ["stop", "mark", "close", "down"]
    assert os.environ[INHERITED] == "outer"
    book = store_of(pytest_lab.inventory_of(config)).read().book
    assert lease.token not in {entry.token for entry in book}


def test_session_lab_dropped_after_an_error_takes_its_mark_along(rack):
    """Otherwise the next test's session would take the mark for that of a killed command."""
    config = SimpleNamespace(stash=pytest.Stash())
    config.stash[pytest_lab._SESSION_LAB] = rack.session_lab
    rack.session_lab.reset_if_needed(force=False)
    assert dirty.unfinished(rack.folder) != ()
    with pytest.raises(Unreachable), pytest_lab.closing_after_error(config):
        raise Unreachable("host1 does not answer")
    assert dirty.unfinished(rack.folder) == ()
    assert pytest_lab._SESSION_LAB not in config.stash


def test_session_lab_dropped_with_unknown_state_keeps_its_mark_for_the_next_command(rack):
    """After an interrupted test only the mark tells the next command to compare the lab."""
    config = SimpleNamespace(stash=pytest.Stash())
    config.stash[pytest_lab._SESSION_LAB] = rack.session_lab
    rack.session_lab.reset_if_needed(force=False)
    rack.session_lab.end_state_verified = False
    with pytest.raises(Unreachable), pytest_lab.closing_after_error(config):
        raise Unreachable("host1 does not answer")
    (sentence,) = dirty.unfinished(rack.folder)
    assert "the next command compares the lab first" in sentence


def test_session_lab_dropped_after_an_error_is_closed_although_its_mark_stays(rack):
    closed = []
    rack.session_lab.lab.close = lambda: closed.append(True)
    config = SimpleNamespace(stash=pytest.Stash())
    config.stash[pytest_lab._SESSION_LAB] = rack.session_lab
    rack.session_lab.work_mark = SimpleNamespace(mark=SimpleNamespace(remove=lambda: Path(os.devnull, "x").unlink()))
    with pytest.raises(OSError, match="Not a directory"), pytest_lab.closing_after_error(config):
        raise Unreachable("host1 does not answer")
    assert closed == [True]
    rack.session_lab.work_mark = None
