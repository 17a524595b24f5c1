"""Run an experiment on a lab, once or several times: preparation, the run loop, and the measurements."""
