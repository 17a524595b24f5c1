"""Decisions about numbers, one module for each kind of estimand. Pure.

`decision` has the result that all of them return. `run_facts` decides what happened in one run, `event_times` how long
something took, `contrasts` a fault against the same run without it, `paired_runs` runs against their fault-free twins,
`unpaired_runs` runs without a twin, and `level_tolerance` a property of the setting from a single run.
`shares` decides a share of independent trials.
`sequential_looks` and `missing_runs` say what it costs to look more than once, and to lack a run.
"""
