"""Settings of all tests."""

import contextlib
import os
import shlex
import subprocess

import pytest
from hypothesis import HealthCheck, Phase, settings
from samples import samples

# Our machines are shared and slow at times: wall-clock deadlines would be flakes, not findings.
# The phase `explain` runs a failing example hundreds of times more, to comment on it.
settings.register_profile(
    "faultbed",
    deadline=None,
    max_examples=samples(100),
    suppress_health_check=[HealthCheck.too_slow],
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
)
settings.load_profile("faultbed")


def pytest_addoption(parser):
    parser.addoption(
        "--meanwhile", metavar="COMMAND", help="run COMMAND first, while the lab comes up; stop if it fails"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """Run the command of `--meanwhile`: unit tests, on every core, take as long as a lab that has no image yet."""
    command = session.config.getoption("--meanwhile")
    if not command or session.config.option.collectonly:
        return
    from faultbed.harness.pytest_plugin.hooks import uses_lab
    from faultbed.harness.pytest_plugin.session_lab import prewarm
    from faultbed.testbed.errors import FaultbedError
    from faultbed.testbed.tenancy.lab_lease import INHERITED

    if any(map(uses_lab, session.items)):  # the plugin waits with it until the first one of them, if that comes first
        with contextlib.suppress(FaultbedError):  # which reports it
            prewarm(session.config)

    # The command's tests must not act as this session, which holds the lab's lease.
    env = {name: value for name, value in os.environ.items() if name != INHERITED}
    with session.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        status = subprocess.call(shlex.split(command), env=env)
    if status:
        pytest.exit(f"exit code {status} of: {command}", returncode=1)
