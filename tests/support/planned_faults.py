"""Faults planned on the default soft lab: one of each kind, and any of some kinds, for tests of plans."""

from __future__ import annotations

import subprocess
from dataclasses import replace

from hypothesis import strategies as st

from faultbed.inject.fault_plan import plan
from faultbed.inject.kinds.catalogue import CATALOGUE
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.testbed.inventory import lab_inventory
from faultbed.testbed.shipped import inventories

SOFT = lab_inventory.load(inventories() / "soft.yml").topology
PORTS = [link.name for link in SOFT.links]
SOFT_KINDS = [name for name, kind in CATALOGUE.items() if "soft" in kind.fidelity]
RNICS = [f"{host.name}:{rnic.name}" for host in SOFT.hosts for rnic in host.rnics]


def soft(kind, target, *, for_s=1.0, at_s=0.0, **params):
    return plan(FaultSpec(kind=kind, target=target, at_s=at_s, for_s=for_s, params=params), SOFT, lab_kind="soft")


def planned_at(planned, at_s):
    """Return a planned fault whose window begins at another time."""
    return replace(planned, spec=replace(planned.spec, at_s=at_s))


def with_mechanism(planned, **changes):
    """Return a planned fault that is carried out, or proved, in another way."""
    return replace(planned, mechanism=replace(planned.mechanism, **changes))


flaps = st.builds(
    lambda target, for_s, period: FaultSpec(kind="link.flap", target=target, for_s=for_s, params=period),
    st.sampled_from(PORTS + RNICS),
    st.floats(0.05, 60),
    st.one_of(st.just({}), st.fixed_dictionaries({"period": st.floats(0.05, 60), "duty": st.floats(0.01, 0.99)})),
)
drops = st.builds(
    lambda target, params: FaultSpec(kind="packet.drop", target=target, for_s=1.0, params=params),
    st.sampled_from(RNICS),
    st.one_of(
        st.fixed_dictionaries({"share": st.floats(0.000001, 1)}),
        st.fixed_dictionaries({"psn": st.integers(0, (1 << 24) - 1), "qp": st.integers(1, (1 << 24) - 1)}),
    ),
)
_selected = st.one_of(
    st.fixed_dictionaries({"share": st.floats(0.000001, 0.9)}),
    st.fixed_dictionaries({"every": st.integers(1, 10_000)}),
    st.fixed_dictionaries({"psn": st.integers(0, (1 << 24) - 1), "qp": st.integers(1, (1 << 24) - 1)}),
)
packets = st.builds(
    lambda kind, target, params, opcode, direction: FaultSpec(
        kind=kind,
        target=target,
        for_s=1.0,
        params=params | {"opcode": opcode, "direction": direction} | ({"delay": 20} if kind == "packet.delay" else {}),
    ),
    st.sampled_from([name for name in CATALOGUE if name.startswith("packet.") and name != "packet.forge"]),
    st.sampled_from(PORTS + RNICS),
    _selected,
    st.sampled_from(["any", "data", "ack", "nak", "cnp", "read-response", "atomic"]),
    st.sampled_from(["to", "from"]),
)
throttles = st.builds(
    lambda target, percent: FaultSpec(kind="gpu.throttle", target=target, for_s=1.0, params={"percent": percent}),
    st.sampled_from([f"{host.name}:gpu0" for host in SOFT.hosts]),
    st.floats(1, 99),
)
SAMPLES = {name: (CATALOGUE[name].example.target, dict(CATALOGUE[name].example.params)) for name in SOFT_KINDS}
samples = st.sampled_from(sorted(SAMPLES)).map(
    lambda kind: FaultSpec(kind=kind, target=SAMPLES[kind][0], for_s=5.0, params=SAMPLES[kind][1])
)
specs = st.one_of(flaps, drops, packets, throttles, samples)


def assert_shell(text):
    """Assert that a text parses as POSIX shell: a revert with a syntax error fails when the controller is gone."""
    checked = subprocess.run(["sh", "-n"], input=text, capture_output=True, text=True, check=False, timeout=20)
    assert checked.returncode == 0, checked.stderr
