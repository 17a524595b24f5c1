"""The roof: experiment, plan, run, judge, report; the command line and the pytest plugin.

Rooms, from the ground up; each imports only those before it: `experiment` (what a person asks for), `packets` (what a
capture proves), `record` (what a run leaves behind), `analysis` (what it shows), `attribution` (whose fault it was),
`report` (what people read), `run` (the loop), `plugin`, `cli`, `bench`. The modules beside them are shared by all: the
verdict and its words, the judge, one statistical rule, and how files and quantities are read.
"""
