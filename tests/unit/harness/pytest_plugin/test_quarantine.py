"""Quarantine ends at its date: a known flake fails no session before, and fails it after. Stale entries are errors."""

import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faultbed.harness.pytest_plugin.quarantine import LONGEST, Entry, match, read
from faultbed.testbed.errors import ConfigError

pytest_plugins = ["pytester"]
TODAY = dt.datetime.now(dt.UTC).date()
DAY = dt.timedelta(days=1)


def entry(test="t.py::test_a", until=TODAY):
    return Entry(test=test, why="w", until=until)


def test_quarantine_includes_its_last_day():
    assert not entry(until=TODAY).expired(TODAY)
    assert entry(until=TODAY).expired(TODAY + DAY)


@pytest.mark.parametrize(
    ("nodeid", "matches"),
    [
        ("t.py::test_a", True),
        ("t.py::test_a[round3]", True),
        ("t.py::test_a[link.flap]", False),
        ("t.py::test_b", False),
    ],
)
def test_quarantine_matches_each_repetition_of_a_test(nodeid, matches):
    assert (match((entry(),), nodeid) is not None) == matches


def test_quarantine_of_a_parameter_matches_its_repetitions():
    one = entry("t.py::test_a[link.flap]")
    assert match((one,), "t.py::test_a[round2-link.flap]") is one
    assert match((one,), "t.py::test_a[link.flap-round2]") is one


@given(st.text(max_size=40))
def test_quarantine_matches_any_node_id(nodeid):
    assert match((entry(nodeid),), nodeid) is not None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[quarantine]]\ntest="a"\nwhy=" "\nuntil={day}', "write what is known"),
        ('[[quarantine]]\ntest="a"\nwhy="w"\nuntil={far}', "more than 60 days away"),
        ('[[quarantine]]\ntest="a"\nwhy="w"', "until"),
        ('[[quarantine]]\ntest="a"\nwhy="w"\nuntil={day}\nowner="x"', "owner"),
        ('[[quarantine]]\ntest="a"\nwhy="w"\nuntil={day}\n' * 2, "has two entries"),
        ("[[quarantine", "quarantine.toml"),
    ],
)
def test_quarantine_file_error_is_reported(tmp_path, text, words):
    path = tmp_path / "quarantine.toml"
    path.write_text(text.format(day=TODAY, far=TODAY + LONGEST + DAY))
    with pytest.raises(ConfigError, match=words):
        read(path, today=TODAY)


def test_quarantine_without_a_file_is_empty(tmp_path):
    assert read(tmp_path / "none.toml", today=TODAY) == ()


@pytest.fixture
def session(pytester):
    """Run two failing tests and a passing one with this quarantine."""
    pytester.makepyfile(test_x="def test_a(): assert False\ndef test_b(): pass\ndef test_c(): assert False\n")

    def run(text, *argv):
        (pytester.path / "q.toml").write_text(text)
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", "--faultbed-quarantine", "q.toml", *argv)

    return run


def quarantined(test, until):
    return f'[[quarantine]]\ntest = "test_x.py::{test}"\nwhy = "slow clock"\nuntil = {until}\n'


def test_quarantine_before_its_end_failure_is_xfailed(session):
    result = session(quarantined("test_a", TODAY) + quarantined("test_c", TODAY))
    result.assert_outcomes(passed=1, xfailed=2)
    assert result.ret == 0


def test_quarantine_after_its_end_even_a_passing_test_fails(session):
    result = session(quarantined("test_b", TODAY - DAY))
    result.assert_outcomes(errors=1, failed=2)
    result.stdout.fnmatch_lines(["*its quarantine ended on*slow clock*fix the test*"])


def test_quarantine_entry_without_its_test_is_an_error(session):
    result = session(quarantined("test_z", TODAY))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*no such test: test_x.py::test_z*"])


def test_quarantine_entries_of_unselected_tests_are_not_stale(session):
    assert session(quarantined("test_c", TODAY), "-k", "test_b").ret == 0
    assert session(quarantined("test_c", TODAY), "test_x.py::test_b").ret == 0


def test_quarantine_entry_without_its_file_is_an_error_for_every_selection(session):
    """The entries of a renamed file used to be ignored for ever."""
    gone = quarantined("test_a", TODAY).replace("test_x.py", "test_renamed.py")
    for argv in ((), ("test_x.py::test_b",), ("-k", "test_b")):
        result = session(gone, *argv)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(["*no such test: test_renamed.py::test_a*"])


def test_quarantine_entry_beside_last_failed_tests_is_kept(pytester):
    """`--lf` collects only part of a file, and the entry of another test there used to be treated as stale."""
    pytester.makepyfile(test_x="def test_a(): assert False\ndef test_b(): assert False\n")
    (pytester.path / "q.toml").write_text(quarantined("test_a", TODAY))
    options = ("--faultbed-quarantine=q.toml", "--override-ini=cache_dir=kept")
    pytester.runpytest_inprocess(*options).assert_outcomes(failed=1, xfailed=1)
    pytester.runpytest_inprocess("--lf", *options).assert_outcomes(failed=1)
