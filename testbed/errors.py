"""Every error faultbed raises on purpose.

Each message says what happened, where, and what to do; `exit_code` is what the command line ends with.

    FaultbedError (3)
    ├── UsageError (4)            the person asked for something that is not there
    │   └── ConfigError (4)       a file is wrong: the message carries the file and the path inside it
    ├── LabError (3)              the lab did not do what it was told
    │   ├── Unreachable (3)       a node does not answer, or its host key is not the pinned one
    │   ├── BootFailed (3)        a VM did not come up by its deadline
    │   ├── CommandFailed (3)     a command on a node ended with an error or ran past its deadline
    │   └── DirtyLab (5)          the lab is not in its baseline state, or nobody can tell
    └── FaultError (3)            the injector could not do its work
        ├── Unsupported (4)       this lab has no way to do this fault
        └── RevertFailed (5)      a fault may still be in place

`Interrupted` (3, or 5 for a DIRTY lab) is a KeyboardInterrupt and not one of these: no error handler stops it.
"""

from __future__ import annotations

__all__ = [
    "BootFailed",
    "CommandFailed",
    "ConfigError",
    "DirtyLab",
    "FaultError",
    "FaultbedError",
    "Interrupted",
    "LabError",
    "RevertFailed",
    "Unreachable",
    "Unsupported",
    "UsageError",
]


class FaultbedError(Exception):
    """Base of all errors raised on purpose."""

    exit_code: int = 3


class UsageError(FaultbedError):
    """The person asked for something that is not there."""

    exit_code = 4


class ConfigError(UsageError):
    """A file is wrong; the message carries the file and the path inside it."""


class LabError(FaultbedError):
    """The lab did not do what it was told."""


class Unreachable(LabError):
    """A node does not answer, or its host key is not the pinned one."""


class BootFailed(LabError):
    """A VM did not come up by its deadline."""


class CommandFailed(LabError):
    """A command on a node ended with an error or ran past its deadline."""


class HalfProvisioned(LabError):
    """Provisioning failed after it had reached a machine, which may be changed in part."""


class DirtyLab(LabError):
    """The lab is not in its baseline state, or nobody can tell."""

    exit_code = 5


class FaultError(FaultbedError):
    """The injector could not do its work."""


class Unsupported(FaultError):
    """This lab has no way to do this fault."""

    exit_code = 4


class RevertFailed(FaultError):
    """A fault may still be in place."""

    exit_code = 5


class Interrupted(KeyboardInterrupt):
    """A command that Ctrl-C or SIGTERM ended; the message says what was seen of its faults and of the lab."""

    def __init__(self, said: str, *, exit_code: int = 3) -> None:
        super().__init__(said)
        self.exit_code = exit_code
