"""The names of an experiment file on a lab: selectors resolved, and errors that say where in the file they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from faultbed.harness.experiment.declare.toml_lines import located
from faultbed.testbed.errors import ConfigError, UsageError
from faultbed.testbed.model.selectors import select, select_one
from faultbed.testbed.model.topology import Topology
from faultbed.traffic.engine.engine_client import FabricModel

__all__ = ["LabNames"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabNames:
    """The names on a lab, for the experiment file `source`. A `path` is a place in it, such as `workload.ranks[0]`.

    `text` is the file's content. Methods raise a `ConfigError` that names file, line and path.
    """

    source: str
    text: str = ""
    lab: FabricModel

    @property
    def topology(self) -> Topology:
        """The lab's topology."""
        return self.lab.topology

    def error(self, path: str, message: str) -> ConfigError:
        """Return an error of the file."""
        return ConfigError(f"{located(self.source, self.text, path)}: {message}")

    @contextlib.contextmanager
    def at(self, path: str) -> Iterator[None]:
        """Turn a `UsageError` of the block into an error of the file."""
        try:
            yield
        except UsageError as error:
            raise self.error(path, str(error)) from error

    def select(self, path: str, text: str) -> tuple[str, ...]:
        """Return the names that a selector stands for, at least one; a name stands for itself."""
        with self.at(path):
            return select(self.topology, text)

    def select_one(self, path: str, text: str) -> str:
        """Return the one name that a selector stands for; a name stands for itself."""
        with self.at(path):
            return select_one(self.topology, text)

    def check_rnic(self, path: str, name: str) -> None:
        """Check that a name is that of an RNIC."""
        with self.at(path):
            target = self.topology.resolve(name)
        if target.kind != "rnic":
            raise self.error(path, f'"{name}" is a {target.kind}, not an RNIC; write one like host1:rxe0')
