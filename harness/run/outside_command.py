"""Look at a lab around a command that faultbed does not know: quiet time, the command at work, and the time after."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from faultbed.inject.evidence.outside_fault import OutsideFault, Place, links_at, reach_of
from faultbed.inject.evidence.watched_links import addresses_on
from faultbed.testbed.errors import LabError
from faultbed.testbed.lab import Lab
from faultbed.testbed.model.lab_kind import LabKind, traits_of
from faultbed.testbed.model.topology import Topology
from faultbed.testbed.observe import counters, fingerprint, telemetry
from faultbed.testbed.observe.counters import Snapshot
from faultbed.testbed.observe.fingerprint import Fingerprint
from faultbed.testbed.observe.telemetry import CHANGES_LOST, Change

__all__ = ["watch_lab"]

_LOOK_S = 0.5
"""Pause between two looks at the whole state; what the kernels report between them is heard at once."""
_QUEUES = ("qdisc", "filter")


@dataclass(kw_only=True)
class _Seen:
    """What was seen while a command was at work."""

    changed: dict[Place, str] = field(default_factory=dict)
    beyond_queues: set[Place] = field(default_factory=set)
    """Places of which something besides their queues and filters has changed."""
    readings: list[Snapshot] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    looks: int = 0

    def add(self, node: str, subject: str, line: str, *, only_queue: bool = False) -> None:
        """Record a difference, under its node and the interface or RNIC that its subject names."""
        if subject.startswith(fingerprint.OF_TRAFFIC):
            return
        place = (node, fingerprint.interface_of(subject))
        self.changed.setdefault(place, line)
        if not (only_queue or subject.startswith(_QUEUES)):
            self.beyond_queues.add(place)


def watch_lab(
    lab: Lab, act: Callable[[], None], *, quiet_s: float, hold_s: float, say: Callable[[str], None]
) -> OutsideFault:
    """Watch a lab for `quiet_s`, then while `act` runs and for `hold_s` after it, and compare its state at the end.

    Links whose ends changed are watched for packets when the lab is as before: they have the same traffic then.

    Raises:
        LabError: the lab could not be read before the command; it was not run.
    """
    heard: list[Change] = []
    with telemetry.start(lab, on_change=heard.append) as following:
        say(f"watching the quiet lab for {quiet_s:g} s")
        before = fingerprint.capture(lab)
        first, first_s = counters.read(lab), time.monotonic()
        time.sleep(quiet_s)
        second, second_s = counters.read(lab), time.monotonic()
        seen = _Seen(unknown=fingerprint.unknown(before))
        seen.unknown += [f"the lab was not quiet before the command: {_line(change)}" for change in _real(heard)[:1]]
        heard.clear()
        say("the command is at work")
        with _looking(lab, before, seen):
            act()
            time.sleep(hold_s)
        left: list[str] = []
        third, third_s = second, time.monotonic()
        try:
            third, third_s = counters.read(lab), time.monotonic()
            say("comparing the lab with its state before")
            left = fingerprint.settle(lab, before)
        except LabError as error:
            seen.unknown.append(str(error))
        recorded = following.stop()
    for change in _real(heard):
        seen.add(change.node, change.subject, _line(change), only_queue=_is_of_queue(change, before))
    seen.unknown += [f"{one.name}: {one.lost}" for one in recorded.machines if one.lost is not None]
    seen.unknown += [f"{change.node}: the kernel dropped reports" for change in heard if change.subject == CHANGES_LOST]
    seen.unknown += [f"{node} has booted meanwhile" for node in counters.restarted(first, third)]
    return OutsideFault(
        changed=seen.changed,
        left=left,
        before=counters.growth((first, second)),
        during=counters.growth((second, *seen.readings, third)),
        before_s=second_s - first_s,
        during_s=third_s - second_s,
        looks=seen.looks,
        reach=reach_of(lab.topology, seen.changed, _addresses(lab, seen)),
        hidden=_hidden(lab.topology, lab.kind, seen),
        unknown=seen.unknown,
    )


def _addresses(lab: Lab, seen: _Seen) -> Mapping[str, frozenset[str]]:
    """Watch the links at which interfaces changed; without one, those of the nodes that changed."""
    places = [place for place in seen.changed if place[1]] or list(seen.changed)
    links = {link.name: link for place in places for link in links_at(lab.topology, place)}
    try:
        return addresses_on(lab, links)[0]
    except (LabError, OSError):
        return {}


def _hidden(topology: Topology, kind: LabKind, seen: _Seen) -> frozenset[Place]:
    """Return the changed interfaces whose packet counters do not count RDMA, although the change may concern it.

    The kernel of a host does not see the packets of a hardware RNIC. So its queues and filters do not either, and for a
    change of these alone the counters are right.
    """
    if traits_of(kind).is_emulated:
        return frozenset()
    return frozenset(place for place in seen.beyond_queues if place[0] in topology.host_by_name)


@contextlib.contextmanager
def _looking(lab: Lab, before: Fingerprint, seen: _Seen) -> Iterator[None]:
    """Read state and counters of a lab, again and again on a thread, during a `with` block."""
    is_over = threading.Event()

    def look() -> None:
        try:
            while not is_over.wait(_LOOK_S if seen.looks else 0.0):
                now = fingerprint.capture(lab)
                for node, subject, line in fingerprint.differences(before, now):
                    was, new = before.nodes.get(node, {}).get(subject, ""), now.nodes.get(node, {}).get(subject, "")
                    seen.add(node, subject, line, only_queue=subject.startswith("link ") and _same_but_queue(was, new))
                seen.unknown += fingerprint.unknown(now)
                seen.readings.append(counters.read(lab))
                seen.looks += 1
        except Exception as error:  # noqa: BLE001 (a look that ended for any reason has not seen what came after it)
            seen.unknown.append(f"the lab was no longer looked at: {error}")

    thread = threading.Thread(target=look, name="looks at the lab", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        while thread.is_alive():  # in small steps, so that Ctrl-C reaches the main thread
            thread.join(0.2)


def _is_of_queue(change: Change, before: Fingerprint) -> bool:
    was = before.nodes.get(change.node, {}).get(change.subject, "")
    return change.subject.startswith("link ") and change.text is not None and _same_but_queue(was, change.text)


def _same_but_queue(was: str, now: str) -> bool:
    """Return whether two texts of an interface differ in its queue alone (`... qdisc netem ...`)."""
    return _without_queue(was) == _without_queue(now)


def _without_queue(text: str) -> str:
    first, found, rest = text.partition(" qdisc ")
    return f"{first} {rest.partition(' ')[2]}" if found else text


def _real(changes: Iterable[Change]) -> list[Change]:
    return [change for change in changes if change.subject not in ("kernel", CHANGES_LOST)]


def _line(change: Change) -> str:
    return f"{change.node}: {change.subject} {'is gone' if change.text is None else f'is {change.text}'}"
