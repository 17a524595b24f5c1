"""Counters and changes of a network, as watchers would have recorded them during a synthetic run."""

from __future__ import annotations

from synthetic_run import T0, S

from faultbed.testbed.observe.telemetry import Change, Recorded, Sample

UP = "LOWER_UP UP mtu 4200 qdisc noqueue 02:fb:03:00:01:02 veth"
DOWN = "down mtu 4200 qdisc noqueue 02:fb:03:00:01:02 veth"


def sample(at_s, node="host1", **values):
    named = {name.replace("__", "."): value for name, value in values.items()}
    return Sample(at_ns=T0 + round(at_s * S), node=node, values=named)


def change(at_s, node, subject, text):
    return Change(at_ns=T0 + round(at_s * S), node=node, subject=subject, text=text)


RECORDED = Recorded(
    samples=(sample(0, rxe0__rcvd_seq_err=0), sample(9, rxe0__rcvd_seq_err=3), sample(20, rxe0__rcvd_seq_err=30)),
    changes=(change(9.5, "rtsw1", "link ctsw1", DOWN), change(10.6, "rtsw1", "link ctsw1", None)),
)
