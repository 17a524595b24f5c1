"""A soft GPU for each GPU of kind `soft`: a compute process in a transient systemd service of its own.

A transient service (systemd-run) leaves nothing behind on disk, and gives the process the cgroup that a throttle
acts on: faultbed.slice/faultbed-gpu0.service.
"""

from faultbed_state import StateError, answer, run


def main(wanted, check):
    """Entry point of the action on_node."""
    answer(_bring, wanted, check=check)


def _bring(wanted, changes):
    for gpu in wanted["gpus"]:
        if gpu["kind"] == "soft":
            _service(gpu["name"], wanted["code"], changes)


def _service(gpu, code, changes):
    unit = f"faultbed-{gpu}.service"
    shown = run(["systemctl", "show", unit, "-p", "ActiveState,Environment"])
    state = dict(line.partition("=")[::2] for line in shown.splitlines())
    path = f"PYTHONPATH={code}"
    if state.get("ActiveState") == "active" and path in state.get("Environment", "").split():
        return
    if not changes.really(f"{unit} started with {code}"):
        return
    if state.get("ActiveState") != "inactive":
        run(["systemctl", "stop", unit])
        run(["systemctl", "reset-failed", unit], ok=(0, 1))
    program = ["/usr/bin/python3", "-m", "traffic.node.softgpu", f"/run/faultbed/{gpu}.sock"]
    run(
        [
            "systemd-run",
            "--quiet",
            f"--unit={unit}",
            "--slice=faultbed.slice",
            f"--setenv={path}",
            "--property=RuntimeDirectory=faultbed",
            "--property=RuntimeDirectoryPreserve=yes",
            # The default weight, said aloud: systemd turns the cpu controller on (cpu.max) only where it is asked for.
            "--property=CPUWeight=100",
            *program,
        ]
    )
    if run(["systemctl", "is-active", unit], ok=(0, 3)).strip() not in {"active", "activating"}:
        told = run(["journalctl", "--quiet", "--no-pager", "-n", "3", "-o", "cat", "-u", unit])
        raise StateError(f"{unit} ended at once: {' | '.join(told.splitlines())}")
