"""The address of an RNIC is removed and given again, in a network namespace of its own; its GID table is a stand-in."""

from __future__ import annotations

from own_namespace import answer_of

PROGRAM = """
import json, pathlib, subprocess, tempfile
from faultbed.inject.node.actuator import Refused
from faultbed.inject.node.network import rnic_address
from faultbed.inject.node.network.rnic_address import RnicAddressActuator
from faultbed.testbed.node.counts import Place

def ip(words):
    return subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True).stdout

table = pathlib.Path(tempfile.mkdtemp())
gids = table / "rxe0/ports/1/gids"
gids.mkdir(parents=True)
rnic_address._INFINIBAND = str(table)
rnic_address._SETTLE_S = 0.3
ZERO, OWN = "0000:" * 7 + "0000", "0000:0000:0000:0000:0000:ffff:0a09:0002"
for index in range(64):
    (gids / str(index)).write_text((OWN if index in (2, 3) else ZERO) + "\\n")
real_run, is_held = rnic_address.run, False

def run(argv, stdin=None):
    # The kernel's table: a GID that a queue pair holds keeps its slot, and comes back at another one.
    out = real_run(argv, stdin=stdin)
    has_address = "10.9.0.2/" in ip("-4 address show dev be0")
    holds = [path for path in gids.iterdir() if path.read_text().strip() == OWN]
    if not has_address:
        [path.write_text(ZERO + "\\n") for path in holds]
    elif not holds and not is_held:
        [(gids / str(index)).write_text(OWN + "\\n") for index in (8, 9)]
    return out

rnic_address.run = run
ip("link add be0 type veth peer name far")
ip("link set far up")
ip("addr add 10.9.0.2/31 dev be0 metric 7")
ip("link set be0 up")
ip("route add 10.50.0.0/16 via 10.9.0.3 dev be0 src 10.9.0.2 mtu 1400")

def facts():
    return [ip("-4 address show dev be0"), ip("-4 route show table all dev be0")]

def counted(name):
    return Place(None).read()["be0." + name]

def addresses():
    return counted("addresses")

def carriers():
    return counted("carrier_changes")

before = facts()
changes = carriers()
answer = {}

def made(address="10.9.0.2/31", rnic="rxe0"):
    return RnicAddressActuator(rnic=rnic, netdev="be0", address=address)

fault = made()
answer["prepared"] = [fault.prepare(), addresses()]
fault.on()
answer["on"] = [fault.read(), addresses(), carriers() == changes]
fault.off()
answer["off"] = [fault.read(), addresses(), facts() == before, carriers() == changes]
fault.on()
real_run(["sh", "-c", fault.revert_script()])
real_run(["sh", "-c", fault.revert_script()])
answer["script"] = [facts() == before]
run(["true"])
answer["again"] = [fault.read()["applied"]]
is_held = True
fault.on()
try:
    fault.off()
except OSError as error:
    answer["late"] = str(error)
answer["kept"] = addresses()
fault.close()
is_held = False
run(["true"])
answer["refused"] = []
for words, change in (
    (dict(address="10.9.0.9/31"), None),
    ({}, "addr add 10.9.7.1/24 dev be0"),
):
    if change:
        ip(change)
    try:
        made(**words).prepare()
    except Refused as error:
        answer["refused"].append(str(error))
ip("addr del 10.9.7.1/24 dev be0")
is_held = True
[(gids / str(index)).write_text(ZERO + "\\n") for index in (8, 9)]
try:
    made().prepare()
except Refused as error:
    answer["refused"].append(str(error))
print(json.dumps(answer))
"""


def test_rnic_address_goes_and_comes_back_with_routes_and_gid_while_the_link_stays_up():
    answer = answer_of(PROGRAM)
    state = {"rnic": "rxe0", "netdev": "be0"}
    there = {"applied": False, **state, "address": "10.9.0.2/31"}
    assert answer["prepared"] == [{**there, "gid_entries": [2, 3]}, 1]
    assert answer["on"] == [{"applied": True, **state, "address": None, "gid_entries": []}, 0, True]
    assert answer["off"] == [{**there, "gid_entries": [8, 9]}, 1, True, True], "the GID is at other indexes"
    assert answer["script"] == [True]
    assert answer["again"] == [False]
    assert answer["late"] == "the GID of 10.9.0.2 has not come back at rxe0 within 0.3 s"
    assert answer["kept"] == 1
    foreign, several, no_gid = answer["refused"]
    assert foreign.startswith("be0 has the addresses 10.9.0.2/31, and this fault needs 10.9.0.9/31 alone")
    assert several.startswith("be0 has the addresses 10.9.0.2/31, 10.9.7.1/24, and this fault needs")
    assert no_gid == "rxe0 has no GID of 10.9.0.2; run `faultbed preflight`"
