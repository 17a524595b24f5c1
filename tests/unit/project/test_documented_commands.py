"""Run the commands of the documentation that need no lab: each ends as its page promises."""

import pytest
from documented import NO_LAB
from terminals import check, environment, working_directory

pytestmark = pytest.mark.process


@pytest.mark.parametrize("text", NO_LAB, ids=str)
def test_documented_command_without_lab(text, tmp_path_factory, tmp_path):
    folder = working_directory(tmp_path_factory.getbasetemp(), tmp_path)
    env = environment(FAULTBED_HOME=str(folder / "home"))
    env.pop("FAULTBED_LAB", None)
    check(text, NO_LAB[text], folder, env)
