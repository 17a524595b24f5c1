"""The option `--lab` beside another one of the same name."""

import pytest

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.process

THEIRS = "def pytest_addoption(parser):\n    parser.addoption('--lab', help='theirs')\n"
SENTENCE = (
    "ERROR: --lab: another pytest plugin or a conftest.py has an option of this name; rename that one, or switch*"
)


def test_lab_option_of_a_conftest_is_reported_in_one_sentence(pytester):
    pytester.makeconftest(THEIRS)
    pytester.makepyfile("def test_x(): pass")
    result = pytester.runpytest_subprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([SENTENCE])
    result.stderr.no_fnmatch_line("*Traceback*")


def test_lab_option_of_a_plugin_is_reported_in_one_sentence(pytester):
    """The plugin is loaded after ours, as an installed one is whose name sorts behind it."""
    pytester.makepyfile(theirs=THEIRS, test_x="def test_x(): pass")
    result = pytester.runpytest_subprocess("-p", "theirs")
    result.stderr.fnmatch_lines([SENTENCE])
    result.stderr.no_fnmatch_line("*Traceback*")


def test_lab_option_of_a_project_works_without_our_plugin(pytester):
    pytester.makeconftest(THEIRS)
    pytester.makepyfile("def test_x(request): assert request.config.getoption('--lab') == 'theirs'")
    pytester.runpytest_subprocess("-p", "no:faultbed", "--lab", "theirs").assert_outcomes(passed=1)
