"""Experiments from their file to their report, with the command line and the pytest plugin.

Packages, from the lowest; each imports only those before it: `ledger` (what settles a claim), `experiment` (what a
person requests), `packets` (what a capture proves), `record` (what a run leaves behind), `model` (what a job would do,
without a lab), `analysis` (what a run shows), `attribution` (the causes), `live` (what is done on a lab while
something is measured), `parts` (what an experiment can contain), `report` (what people read), `run` (the loop),
`scorecard` (what programs survive), `fuzz`, `pytest_plugin`, `cli`. The modules beside them are
shared by all: the verdict and its words, the judge, errors in words, one statistical rule, and how files and quantities
are read.
"""

# A checkout has this folder beside the package, too: imported from there, each module would exist twice.
if not __name__.startswith("faultbed."):
    raise ImportError("import faultbed.harness instead: harness is a part of the package faultbed, no module by itself")
