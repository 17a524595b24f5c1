"""Placeholder until the provisioning branch lands."""

from typing import Any


def bring_up(lab: Any, progress: Any) -> None: ...
