"""Flows of the engine on a fabric of memory moves: both connected ends, and their final events."""

from __future__ import annotations

from memory_fabric import CLOCK, Rnic, modules

from faultbed.traffic.flows import flow_run


def flow_on(monkeypatch, fabric, *, gpu=None, on_task=lambda _task: None, **change):
    """Return both connected ends of a flow on a fabric; their `done` events are added to its events.

    Their buffers are on `gpu` if it is given. `on_task` gets each end before it is connected.
    """
    node = modules(monkeypatch)
    engine_spec = flow_run.engine_spec(
        flow_run.FlowSpec(**{"src": "host1", "dst": "host2", "message_bytes": 512, **change})
    )
    kinds = node.flow.FlowSender, node.flow.FlowReceiver
    if change.get("check"):
        kinds = node.checked.CheckedSender, node.checked.CheckedReceiver
    if change.get("transport"):
        kinds = node.numbered.NumberedSender, node.numbered.NumberedReceiver
    for name, kind in zip(("tx", "rx"), kinds, strict=True):
        fabric.tasks[name] = kind(name, Rnic("rxe0"), {**engine_spec, "gpu": gpu}, fabric.emit_for(name))
        on_task(fabric.tasks[name])
    fabric.connect([fabric.connection(node, number, "tx", "rx") for number in range(engine_spec["qps"])])


def run_checked(fabric, verb):
    """Run both ends to completion and return the `done` fields of each."""
    fabric.tasks["rx"].begin(0)
    fabric.run(["tx"])
    if fabric.unreliable:
        fabric.drain()
    if verb != "read":
        fabric.tasks["rx"].stop(CLOCK.monotonic_ns())
        fabric.tasks["rx"].tick(CLOCK.monotonic_ns() + 10**9)
    return {who: fields for who, event, fields in fabric.events if event == "done"}
