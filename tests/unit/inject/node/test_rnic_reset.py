"""The routes of a host before and after its RNIC is reset, in a network namespace of its own."""

from __future__ import annotations

from own_namespace import answer_of

PROGRAM = """
import json, subprocess, time
from faultbed.inject.node.network.rnic_reset import RnicResetActuator
from faultbed.testbed.node import state
def ip(words):
    return subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True).stdout
def facts():
    seen = []
    try:
        for fact in state.network_facts():
            seen.append(fact)
    except OSError:  # nftables, which come last, may not be here
        pass
    return sorted(fact for fact in seen if "route " in fact[0])
def is_as(before):
    # The kernel makes the link-local address, and its routes, a moment after a link is up.
    until_s = time.monotonic() + (5.0 if before else 0.0)
    while facts() != before:
        if time.monotonic() > until_s:
            return False
        time.sleep(0.05)
    return True
ip("link add be0 type veth peer name far")
ip("link set far up")
for address in ("10.9.0.2/24", "10.9.0.3/24"):
    ip(f"addr add {address} dev be0")
ip("link set be0 up")
ip("route add 10.50.0.0/16 via 10.9.0.1 dev be0 src 10.9.0.3 mtu 1400")
ip("route add 10.51.0.0/16 via 192.0.2.1 dev be0 onlink table 77")
before = None
while not is_as(before):
    before = facts()
    time.sleep(0.3)
routes = ip("-4 route show table all")
reset = RnicResetActuator(device="be0")
reset.prepare()
reset.on()
reset.off()
same = [is_as(before), ip("-4 route show table all") == routes]
ip("link set be0 down")
ip("link set be0 up")
subprocess.run(["sh", "-c", reset.revert_script()], check=True)
same += [is_as(before)]
ip("route replace 10.50.0.0/16 via 10.9.0.1 dev be0")
print(json.dumps([*same, facts() == before]))
"""


def test_rnic_reset_restores_routes_with_source_mtu_and_onlink_and_the_fingerprint_sees_them():
    """The route came back without its source and MTU, and the lab was CLEAN: no fact contained them."""
    by_reset, shown, by_script, after_change = answer_of(PROGRAM)
    assert (by_reset, shown, by_script) == (True, True, True)
    assert after_change is False
