"""Compare the health of a switch before and after a change: its BGP sessions, and the ports that drop packets.

Sessions are read with vtysh; on SONiC, that command is a script that runs vtysh in the bgp container. Drops are those
of the ASIC on SONiC (sonic-utilities, portstat), and those of the kernel on a Linux switch. Not yet run on hardware.
"""

import contextlib
import json
import subprocess
import time

from faultbed_state import StateError, ip_json, run

__all__ = ["health", "healthy_afterwards", "require_health"]

DROPS = ("RX_DRP", "RX_OVR", "RX_ERR", "TX_DRP", "TX_OVR")
WINDOW_S = 5.0
"""Time between two readings of the drops. syncd polls the ASIC's counters once a second (FLEX_COUNTER_TABLE|PORT)."""
RETRY_S = 2.0
DEADLINE_S = 180.0
"""Deadline for BGP sessions to be established again. SONiC's bgp container takes 30 s and more to start."""
ESTABLISHED = "Established"


@contextlib.contextmanager
def healthy_afterwards(saved, netdevs, notes, *, sonic, unless):
    """Require, after changes in the block, that the switch is as healthy as before the first of them.

    If a run ends before its check has passed, the next run makes the check. `unless` is the setting that disables the
    check, for the error message.

    Raises:
        StateError: the switch is less healthy than before.
    """
    if saved.changes.check:
        yield
        return
    resumed, changes_before = saved.pending("health"), len(saved.changes.made)
    before = resumed or saved.pending("health", health(netdevs, sonic=sonic))
    yield
    if resumed or len(saved.changes.made) > changes_before:
        try:
            notes += require_health(before, netdevs, sonic=sonic, deadline_s=DEADLINE_S)
        except StateError as error:
            raise StateError(
                f"{error}. `faultbed provision --teardown` of this switch restores its earlier configuration; where "
                f"the kind of BGP session changes, {unless} turns this check off"
            ) from None
    saved.passed("health")


def health(netdevs, *, sonic):
    """Return the established sessions of a switch, and the ports that drop packets: {"sessions", "dropping"}.

    `sessions` is None if bgpd does not answer.
    """
    states = _states()
    sessions = None if states is None else sorted(_established(states))
    return {"sessions": sessions, "dropping": sorted(_dropping(netdevs, sonic))}


def require_health(before, netdevs, *, sonic, deadline_s):
    """Wait until a switch is as healthy as it was; return notes about sessions that are not established.

    Sessions that the new configuration does not have need not come back, but a switch that had any must have at least
    one.

    Raises:
        StateError: sessions are still down at the deadline, bgpd does not answer, or ports drop packets that did not
            before.
    """
    deadline, had = time.monotonic() + deadline_s, before["sessions"] or []
    while True:
        states = _states()
        down = [peer for peer in had if states and peer in states and states[peer] != ESTABLISHED]
        if states is not None and not down and (not had or _established(states)):
            break
        if time.monotonic() > deadline:
            lost = f"BGP with {', '.join(down)} is" if down else f"none of {len(had)} BGP sessions is"
            lost = "bgpd does not answer" if states is None else f"{lost} not established again"
            raise StateError(f"{lost} {deadline_s:g} s after the change")
        time.sleep(RETRY_S)
    if new := sorted(set(_dropping(netdevs, sonic)) - set(before["dropping"])):
        raise StateError(f"packets are dropped at {', '.join(new)}, where none were before the change")
    waiting = sorted(set(states) - set(_established(states)))
    notes = [f"BGP with {peer} is {states[peer]}; the other end may not be configured yet" for peer in waiting]
    return notes if before["sessions"] is not None else [*notes, "bgpd did not answer before the change"]


def _states():
    """Return the state of each BGP session by the peer's name, an address or interface; None: bgpd does not answer."""
    try:
        summary = json.loads(run(["vtysh", "-c", "show bgp summary json"]))
    except (StateError, OSError, ValueError, subprocess.SubprocessError):
        return None
    families = [family for family in summary.values() if isinstance(family, dict)]
    return {peer: str(entry.get("state")) for family in families for peer, entry in family.get("peers", {}).items()}


def _established(states):
    return [peer for peer, state in states.items() if state == ESTABLISHED]


def _dropping(netdevs, sonic):
    """Return the ports that drop packets within WINDOW_S."""
    count = _sonic_drops if sonic else _kernel_drops
    first = count()
    time.sleep(WINDOW_S)
    last = count()
    return [netdev for netdev in netdevs if last.get(netdev, 0) > first.get(netdev, 0)]


def _sonic_drops():
    """Return the packets that each port has dropped, from `portstat -j`: numbers as text, N/A if not counted."""
    _, brace, table = run(["portstat", "-j"]).partition("{")
    ports = json.loads(brace + table)
    values = {port: [str(row.get(field, "")).replace(",", "") for field in DROPS] for port, row in ports.items()}
    return {port: sum(int(value) for value in row if value.isdigit()) for port, row in values.items()}


def _kernel_drops():
    links = {link["ifname"]: link.get("stats64", {}) for link in ip_json("-s", "link")}
    return {name: sum(stats.get(way, {}).get("dropped", 0) for way in ("rx", "tx")) for name, stats in links.items()}
