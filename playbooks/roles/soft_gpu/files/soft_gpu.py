"""Run a soft GPU for each GPU of kind `soft`: a compute process in its own transient systemd service.

A transient service (systemd-run) leaves no file on disk. Its cgroup, faultbed.slice/faultbed-gpu0.service, is the one
that GPU throttling limits.
"""

from faultbed_state import StateError, answer, run


def main(desired, check):
    """Entry point of the action on_node."""
    answer(_configure, desired, check=check)


def _configure(desired, changes):
    for gpu in desired["gpus"]:
        if gpu["kind"] == "soft":
            _run_service(gpu["name"], desired["code"], changes)


def _run_service(gpu, code, changes):
    """Start the service of a GPU with the node code in the folder `code`, unless it already runs with it."""
    unit = f"faultbed-{gpu}.service"
    output = run(["systemctl", "show", unit, "-p", "ActiveState,Environment"])
    properties = dict(line.partition("=")[::2] for line in output.splitlines())
    path = f"PYTHONPATH={code}"
    if properties.get("ActiveState") == "active" and path in properties.get("Environment", "").split():
        return
    if not changes.should_make(f"{unit} started with {code}"):
        return
    if properties.get("ActiveState") != "inactive":
        run(["systemctl", "stop", unit])
        run(["systemctl", "reset-failed", unit], ok=(0, 1))
    program = ["/usr/bin/python3", "-m", "faultbed.traffic.node.softgpu", f"/run/faultbed/{gpu}.sock"]
    run(
        [
            "systemd-run",
            "--quiet",
            f"--unit={unit}",
            "--slice=faultbed.slice",
            f"--setenv={path}",
            "--property=RuntimeDirectory=faultbed",
            "--property=RuntimeDirectoryPreserve=yes",
            # The default weight. systemd enables the cpu controller (cpu.max) only for units that set a CPU property.
            "--property=CPUWeight=100",
            *program,
        ]
    )
    if run(["systemctl", "is-active", unit], ok=(0, 3)).strip() not in {"active", "activating"}:
        log = run(["journalctl", "--quiet", "--no-pager", "-n", "3", "-o", "cat", "-u", unit])
        raise StateError(f"{unit} ended at once: {' | '.join(log.splitlines())}")
