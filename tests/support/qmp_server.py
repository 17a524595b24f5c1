"""A QMP server in place of QEMU's: it records links and resets, and reports both as QEMU does."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from pathlib import Path


class Qemu:
    """A QMP server with the device `nic-be0`.

    `late_s` is the delay before a link gets its carrier back, `mute_s` the delay of the answer after its removal.
    """

    def __init__(self, path: Path) -> None:
        self.links: list[bool] = []
        self._shown = path.with_name("link")  # what a guest would show of it, for processes beside this one
        self._show("UP")
        self.resets, self.status, self.tells = 0, "running", True
        self.late_s, self.mute_s, self.is_asked = 0.0, 0.0, threading.Event()
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(path))
        self._server.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _show(self, text: str) -> None:
        whole = self._shown.with_name("link.new")
        whole.write_text(text)
        whole.replace(self._shown)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(timeout=5)

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            with client, client.makefile("rwb", buffering=0) as lines, contextlib.suppress(OSError):
                lines.write(b'{"QMP": {}}\n')
                for line in lines:
                    command = json.loads(line)
                    output = [{"event": "X"}, *self._answer(command["execute"], command.get("arguments") or {})]
                    lines.write(b"".join(json.dumps(each).encode() + b"\n" for each in output))

    def _answer(self, command: str, arguments: dict) -> list[dict]:
        if command == "query-status":
            return [{"return": {"status": self.status}}]
        if command == "system_reset":
            self.resets += 1
            return [{"return": {}}, *[{"event": "RESET", "data": {"guest": False}}] * self.tells]
        if command in ("set_link", "query-rx-filter") and arguments["name"] != "nic-be0":
            return [{"error": {"desc": "Device not found"}}]
        if command == "query-rx-filter":
            return [{"return": [{"name": "nic-be0"}]}]
        if command == "set_link":
            if arguments["up"] and self.late_s:
                self.is_asked.set()
                threading.Event().wait(self.late_s)
            self.links.append(arguments["up"])
            self._show("UP" if arguments["up"] else "DOWN")
            if not arguments["up"]:
                threading.Event().wait(self.mute_s)
        return [{"return": {}}]
