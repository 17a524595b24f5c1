"""Which queue pairs carry the data of a workload, of those that the kernel lists."""

from __future__ import annotations

import json

import pytest
from house import HOUSE

from faultbed.testbed.node.in_use import rnics_in_use as module
from faultbed.testbed.node.in_use.rnics_in_use import carries_data, rnics_in_use
from faultbed.testbed.node.netlink import attribute

TYPE, STATE, PID = 26, 27, 28
TYPES = {"SMI": 0, "GSI": 1, "RC": 2, "UC": 3, "UD": 4, "RAW_PACKET": 8, "XRC_INI": 9, "XRC_TGT": 10, "DRIVER": 255}
STATES = {"RESET": 0, "INIT": 1, "RTR": 2, "RTS": 3, "SQD": 4, "SQE": 5, "ERR": 6}
IDLE = json.loads((HOUSE / "tests/data/recorded/rdma/qps-none-connected.json").read_text())
"""As recorded on an idle host with a ConnectX: a datagram queue pair of the driver is ready, too."""


def entry(kind="RC", state="RTS", pid=7):
    of_process = {} if pid is None else {PID: pid.to_bytes(4, "little")}
    return {TYPE: bytes([TYPES[kind]]), STATE: bytes([STATES[state]]), **of_process}


@pytest.mark.parametrize("kind", ["RC", "UC", "UD", "XRC_INI", "XRC_TGT", "DRIVER"])
@pytest.mark.parametrize("state", STATES)
def test_connected_queue_pair_of_a_process_carries_data(kind, state):
    assert carries_data(entry(kind, state)) == (state in ("RTR", "RTS"))


def test_queue_pairs_that_every_port_has_carry_none():
    assert not any(carries_data(entry(one["type"], one["state"], one.get("pid"))) for one in IDLE)
    assert not any(carries_data(entry(kind)) for kind in ("SMI", "GSI", "RAW_PACKET"))


def test_datagram_queue_pair_of_the_kernel_carries_none_and_a_connected_one_does():
    assert not carries_data(entry("UD", pid=None))
    assert carries_data(entry("RC", pid=None))


@pytest.mark.parametrize("missing", [TYPE, STATE])
def test_queue_pair_without_type_or_state_is_an_error(missing):
    listed = entry()
    del listed[missing]
    with pytest.raises(ValueError, match="without type or state"):
        carries_data(listed)


class Rdma:
    """Answers of the kernel: two devices, with these queue pairs; an OSError: this device does not list them."""

    def __init__(self, tables):
        self.tables = tables

    def dump(self, _kind, body):
        if not body:
            return [(0, attribute(1, bytes([number, 0, 0, 0])) + attribute(2, f"rxe{number}\0".encode()))
                    for number in range(len(self.tables))]  # fmt: skip
        table = self.tables[body[4]]
        if isinstance(table, OSError):
            raise table
        entries = [b"".join(attribute(*item) for item in one.items()) for one in table]
        return [(0, attribute(19, b"".join(attribute(20, one) for one in entries)))]

    def close(self):
        pass


def test_devices_with_a_connected_queue_pair_are_in_use(monkeypatch):
    tables = [[entry(state="INIT"), entry("GSI", pid=None)], [entry("GSI", pid=None), entry()], []]
    monkeypatch.setattr(module, "Netlink", lambda _: Rdma(tables))
    assert rnics_in_use() == ["rxe1"]


def test_device_that_cannot_list_queue_pairs_is_an_error_not_idle(monkeypatch):
    monkeypatch.setattr(module, "Netlink", lambda _: Rdma([[], OSError("not supported")]))
    with pytest.raises(OSError, match="not supported"):
        rnics_in_use()
