"""What a job would do on a fabric: a model of link rates, collectives and faults. No packet is sent.

Every result is *modelled*: nothing here gives a verdict. `faultbed.testbed.routing.max_min` has the rates of links,
`step_times` the time of a collective, `experiment_prediction` that of an experiment on a lab, `training_step` that of a
large model on a preset fabric.
"""
