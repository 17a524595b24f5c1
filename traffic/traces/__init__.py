"""Traces of what jobs communicate: PARAM comms traces and Chakra execution traces, read, joined and written."""

from __future__ import annotations

from traffic.traces.files import FORMATS, digest, files_of, load, save
from traffic.traces.model import Note, Operation, Trace, fitted

__all__ = ["FORMATS", "Note", "Operation", "Trace", "digest", "files_of", "fitted", "load", "save"]
