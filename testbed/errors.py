"""The errors that faultbed raises on purpose. A module that needs a more specific one derives it from one of these.

Each message says where, what is wrong, and what to do; `exit_code` is the exit status of the command line.

    FaultbedError (3)
    ├── UsageError (4)            the user named something that does not exist, or gave a value that cannot be used
    │   ├── ConfigError (4)       a file is wrong: the message carries the file and the path inside it
    │   └── RecordError (3)       a file of a run was edited, damaged or written by another version
    ├── LabError (3)              the lab could not do what was requested
    │   ├── Unreachable (3)       a node does not answer, or its host key is not the pinned one
    │   ├── BootFailed (3)        a VM did not come up by its deadline
    │   ├── CommandFailed (3)     a command on a node ended with an error or ran past its deadline
    │   ├── HalfProvisioned (3)   provisioning failed after it may have changed a machine
    │   └── DirtyLab (5)          the lab is not in its baseline state, or its state is unknown
    └── FaultError (3)            the injector could not do its work
        ├── Unsupported (4)       this lab cannot do this fault
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
    "RecordError",
    "RevertFailed",
    "Unreachable",
    "Unsupported",
    "UsageError",
]


class FaultbedError(Exception):
    """Base of all errors raised on purpose."""

    exit_code: int = 3


class UsageError(FaultbedError):
    """The user named something that does not exist, or gave a value that cannot be used."""

    exit_code = 4


class ConfigError(UsageError):
    """A file is wrong; the message carries the file and the path inside it."""


class RecordError(UsageError):
    """A file of a run was edited, damaged or written by another version; the message carries the file and the field."""

    exit_code = 3


class LabError(FaultbedError):
    """The lab could not do what was requested."""


class Unreachable(LabError):
    """A node does not answer, or its host key is not the pinned one."""


class BootFailed(LabError):
    """A VM did not come up by its deadline."""


class CommandFailed(LabError):
    """A command on a node ended with an error or ran past its deadline."""


class HalfProvisioned(LabError):
    """Provisioning failed after it had reached a machine, so the machine may be partly changed."""


class DirtyLab(LabError):
    """The lab is not in its baseline state, or its state is unknown."""

    exit_code = 5


class FaultError(FaultbedError):
    """The injector could not do its work."""


class Unsupported(FaultError):
    """This lab cannot do this fault."""

    exit_code = 4


class RevertFailed(FaultError):
    """A fault may still be in place."""

    exit_code = 5


class Interrupted(KeyboardInterrupt):
    """A command that Ctrl-C or SIGTERM ended; the message says how its faults and the lab were left."""

    def __init__(self, message: str, *, exit_code: int = 3) -> None:
        super().__init__(message)
        self.exit_code = exit_code
