"""A headless Chromium for tests and for the report bench, controlled over two pipes (the DevTools protocol).

It gets a new profile folder and its own process group, which is killed at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from faultbed.testbed.errors import LabError

__all__ = ["Browser", "browser", "installed"]

TIMEOUT_S = 120.0
"""Timeout of one answer, long enough for an emulated or busy machine."""


def installed() -> str | None:
    """Return the path of Chromium or Chrome, under any name that distributions use; None: not installed."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for name in names if (path := shutil.which(name))), None)


class Browser:
    """Connection to Chromium over two pipes. Every message ends with a NUL."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._out, self._in = to_browser, from_browser
        self._received = b""
        self._last_id = 0
        self._session: str | None = None
        self.requested: list[str] = []

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answer = self._wait_for(lambda message: message.get("id") == self._last_id)
        if "error" in answer:
            raise LabError(f"Chromium, {method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, page: Path, *, width: int, height: int = 900) -> None:
        """Show a page in a viewport of this width, and wait until it is loaded."""
        self._session = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.send("Page.enable")
        self.send("Network.enable")
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send("Page.navigate", url=page.as_uri())
        self._wait_for(lambda message: message.get("method") == "Page.loadEventFired")

    def value(self, expression: str) -> Any:
        """Evaluate an expression in the page. The page's security policy does not apply to the debugger."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise LabError(f"Chromium, {expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def _wait_for(self, is_wanted: Any) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            while b"\0" in self._received:
                frame, _, self._received = self._received.partition(b"\0")
                message: dict[str, Any] = json.loads(frame)
                if message.get("method") == "Network.requestWillBeSent":
                    self.requested.append(message["params"]["request"]["url"])
                if is_wanted(message):
                    return message
            left = deadline - time.monotonic()
            if left <= 0:
                raise LabError(f"Chromium did not answer within {TIMEOUT_S:g} s")
            if select.select([self._in], [], [], left)[0]:
                more = os.read(self._in, 1 << 16)
                if not more:
                    raise LabError("Chromium has ended")
                self._received += more


@contextlib.contextmanager
def browser(program: str, profile: Path) -> Iterator[Browser]:
    """Run Chromium while the block lasts. It reads commands from descriptor 3 and answers on descriptor 4."""
    command_out, command_in = os.pipe()
    answer_out, answer_in = os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    options += ["--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    # Variables hold the descriptors, because one redirection could overwrite the other pipe.
    shell = 'commands=$1 answers=$2; shift 2; eval "exec \\"\\$@\\" 3<&$commands 4>&$answers"'
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", str(command_out), str(answer_in), program, *options],
        pass_fds=(command_out, answer_in),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(command_out)
    os.close(answer_in)
    try:
        yield Browser(command_in, answer_out)
    finally:
        os.close(command_in)
        with contextlib.suppress(ProcessLookupError):
            # The process group has only Chromium and the processes that it started.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(TIMEOUT_S)
        os.close(answer_out)
        shutil.rmtree(profile, ignore_errors=True)
