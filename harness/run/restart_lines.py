"""Progress lines about the restarts of a job, as they happen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from faultbed.traffic.engine.running_traffic import OnEvent
from faultbed.traffic.workloads.elastic.elastic_results import Restart

__all__ = ["restart_lines"]


def restart_lines(progress: Callable[[str], None]) -> OnEvent:
    """Return a listener that reports the beginning and the end of each restart, and lost spares."""

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "spare_lost":
            progress(f"job: the spare on {event['host']} is lost")
        if event["event"] != "restart":
            return
        restart: Restart = event["restart"]
        if event["phase"] == "diagnose":
            progress(f"job: restart {restart.number} after {restart.iterations} iterations: {restart.reason}")
        elif event["phase"] == "initialise":
            progress(f"job: restart {restart.number}: ranks on {', '.join(restart.after)}")
        elif event["phase"] in ("catch_up", "running") and restart.restored_iterations is not None:
            state = "caught up" if event["phase"] == "running" else "restored"
            progress(f"job: restart {restart.number}: {state}, from iteration {restart.restored_iterations} on")

    return listen
