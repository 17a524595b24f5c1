"""PFC pause frames on a real wire of this machine: two ends of a veth pair in a network namespace."""

from __future__ import annotations

import struct

import pytest
from own_namespace import answer_of
from rack_actuator_cases import LINUX, RACK

from faultbed.inject.evidence.observation import Observation
from faultbed.inject.evidence.receipt import Armed, judge_fired
from faultbed.inject.fault_plan import plan
from faultbed.inject.kinds.fault_spec import FaultSpec
from faultbed.inject.node.network.pause_frames import pfc_frame
from faultbed.testbed.errors import Unsupported, UsageError

STORM = """
import json, socket, subprocess, time
from faultbed.inject.node.actuator import make
from faultbed.inject.node.mutant import Mutant
subprocess.run("ip link add up1 type veth peer name up2", shell=True, check=True)
subprocess.run("ip link set up1 up && ip link set up2 up", shell=True, check=True)
time.sleep(0.2)
end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x8808))
end.bind(("up2", 0x8808))
end.setblocking(False)
actuator = make("pause", {"device": "up1", "priority": 3, "burst_s": 0.02, "period_s": 0.1, "pause_s": 0.002})
if MUTATE:
    actuator = Mutant(actuator, MUTATE)
actuator.prepare()
actuator.on()
on = actuator.read()
time.sleep(1.0)
actuator.off()
off = actuator.read()
heard = []
def frames():
    while True:
        try:
            heard.append(end.recv(2048))
        except BlockingIOError:
            return len(heard)
count = frames()
time.sleep(0.3)
after = frames() - count
print(json.dumps([on, off, [f.hex() for f in heard], actuator.hits(), after]))
"""


def storm(mutate=None):
    return answer_of(f"MUTATE = {mutate!r}\n{STORM}")


def test_pause_frame_is_that_of_the_standard():
    frame = pfc_frame(bytes.fromhex("020000000001"), 3, 0xFFFF)
    assert len(frame) == 60
    assert frame[:18].hex() == "0180c2000001" + "020000000001" + "8808" + "0101" + "0008"
    assert struct.unpack("!8H", frame[18:34]) == (0, 0, 0, 0xFFFF, 0, 0, 0, 0)


def test_pause_storm_sends_bursts_ends_the_pause_and_falls_silent():
    on, off, frames, hits, after = storm()
    assert (on["applied"], on["device"], on["priority"], off["applied"]) == (True, "up1", 3, False)
    quanta = [int(frame[(18 + 6) * 2 : (18 + 8) * 2], 16) for frame in frames]
    assert {frame[:12] for frame in frames} == {"0180c2000001"}
    assert set(quanta) == {0, 0xFFFF}
    assert quanta[-1] == 0, "the neighbour may send at once"
    assert quanta.count(0xFFFF) == hits > 20
    # At most one frame each half pause of the bursts: ten bursts of 20 ms have room for 220 of them.
    assert hits <= 230
    assert after == 0


@pytest.mark.parametrize("mutate", ["noop", "lie"])
def test_pause_storm_that_sends_nothing_is_not_proven(mutate):
    on, _, frames, hits, _ = storm(mutate)
    assert frames in ([], frames[:1])
    assert on["applied"] is (mutate == "lie")
    planned = planned_storm("host1:mlx5_0")
    (witness,) = planned.mechanism.must_move
    node, _, name = witness.any_of[0].partition("/")
    reading = {node: {name: 5}}
    _, doubts = judge_fired(
        planned,
        armed=Armed(ok=on["applied"], readback={"applied": on["applied"], **planned.mechanism.shows}),
        observed=Observation(state="over", count=max(hits, 1)),
        before=reading,
        after=reading,
    )
    assert any("no independent witness" in doubt for doubt in doubts), doubts


def planned_storm(target, topology=RACK, *, for_s=5.0, **params):
    spec = FaultSpec(kind="congestion.pfc-storm", target=target, for_s=for_s, params=params)
    return plan(spec, topology, lab_kind="rack")


def test_pause_storm_is_witnessed_by_the_neighbours_port():
    (at_switch,) = planned_storm("host1:mlx5_0").mechanism.must_move
    assert at_switch.any_of == ("rtsw1/Ethernet0.asic_rx_pause",)
    # 5 s of which a tenth is paused, by frames of 84 µs at 400 Gb/s; a tenth of them must arrive.
    assert at_switch.at_least == pytest.approx(5.0 * 0.1 / (65_535 * 512 / 400e9) * 0.1, rel=0.01)
    at_rnic = planned_storm("rtsw1:host1:mlx5_0", LINUX, priority=4)
    assert at_rnic.place.node == "rtsw1"
    assert at_rnic.mechanism.must_move[0].any_of[0].endswith(".rx_prio4_pause")


@pytest.mark.parametrize(
    ("target", "topology", "for_s", "params", "error", "words"),
    [
        ("rtsw1:host1:mlx5_0", RACK, 5.0, {}, Unsupported, "forwards in its ASIC"),
        ("host1:mlx5_0", LINUX, 5.0, {}, Unsupported, "does not count the pause frames"),
        ("host1:mlx5_0", RACK, 61.0, {}, UsageError, "at most 60 s"),
        ("host1:mlx5_0", RACK, 5.0, {"burst": 80, "period": 90}, UsageError, "watchdog may act"),
        ("host1:mlx5_0", RACK, 5.0, {"burst": 100}, UsageError, "1..80"),
        ("host1:mlx5_0", RACK, 5.0, {"priority": 8}, UsageError, "0..7"),
    ],
)
def test_pause_storm_that_is_unbounded_or_unproven_is_refused(target, topology, for_s, params, error, words):
    with pytest.raises(error, match=words):
        planned_storm(target, topology, for_s=for_s, **params)
