"""The roof: experiment, plan, run, judge, report; the command line and the pytest plugin."""
