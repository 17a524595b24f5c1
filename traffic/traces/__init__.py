"""Communication traces of jobs: PARAM comms traces and Chakra execution traces are read, joined and written."""

from __future__ import annotations

from faultbed.traffic.traces.trace import Note, Operation, Trace, fitted
from faultbed.traffic.traces.trace_files import FORMATS, digest, files_of, load, save

__all__ = ["FORMATS", "Note", "Operation", "Trace", "digest", "files_of", "fitted", "load", "save"]
