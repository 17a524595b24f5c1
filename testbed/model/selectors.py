"""Selectors: names of targets that fit any lab, such as `uplink[0]`, `rnic[*]` or `host[1]:gpu[0]`.

    selector = step *(":" step)
    step     = class "[" index "]"     members of a class, inside what the previous step has selected
             | name                    a host or a switch (first step), or an RNIC or a GPU of a host
    index    = 0, 1, ...               in the order of the inventory; 0 is the first
             | -1, -2, ...             from the end; -1 is the last
             | "*"                     all of them

Classes are `zone`, `rack`, `host`, `switch`, `rtsw`, `ctsw` (also called `spine`), `atsw`, `rnic`, `gpu`, `uplink` (a
link between two switches) and `downlink` (a link from a rack switch to an RNIC, named from the switch). A text without
brackets is the name of a target. Pure functions: the same topology and selector give the same names.

`used-uplink`, allowed as the last step of a fault's target, selects among the uplinks that queue pairs cross at the
moment when the fault is armed, and `path[host1:rxe0>host3:rxe0]` a place on the path between two RNICs. `candidates`
returns all places that may be selected, `choose` the one that is.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from faultbed.testbed.errors import UsageError
from faultbed.testbed.model.path_selector import Pair, PlaceOnPath, ends_in, names_on_path
from faultbed.testbed.model.topology import Link, Switch, Target, Topology
from faultbed.testbed.suggestions import hint

__all__ = [
    "CLASSES",
    "candidates",
    "choose",
    "is_chosen_later",
    "is_selector",
    "path_ends",
    "resolve",
    "select",
    "select_one",
]

_STEP = re.compile(r"(?P<word>[A-Za-z0-9_.-]+)(?:\[(?P<index>\*|-?[0-9]{1,6})\])?")
_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scope:
    """Part of a lab in which the next step selects: the whole lab, or one selected thing.

    `kind` is `lab`, or the class of the thing called `name`.
    """

    kind: str
    name: str

    def __str__(self) -> str:
        return self.name if self.kind in ("lab", "host", "switch") else f"{self.kind} {self.name}"


def _switches(topology: Topology, scope: _Scope) -> list[Switch]:
    is_inside_by_kind: Mapping[str, Callable[[Switch], bool]] = {
        "lab": lambda _: True,
        "zone": lambda switch: switch.zone == scope.name,
        "rack": lambda switch: switch.rack == scope.name,
        "switch": lambda switch: switch.name == scope.name,
    }
    is_inside = is_inside_by_kind.get(scope.kind)
    return [switch for switch in topology.switches if is_inside(switch)] if is_inside is not None else []


def _hosts(topology: Topology, scope: _Scope) -> list[str]:
    attribute = {"zone": "zone", "rack": "rack", "host": "name"}.get(scope.kind)
    if attribute is None:
        return [host.name for host in topology.hosts] if scope.kind == "lab" else []
    return [host.name for host in topology.hosts if getattr(host, attribute) == scope.name]


def _racks(topology: Topology, scope: _Scope) -> list[str]:
    return [topology.host_by_name[name].rack for name in _hosts(topology, scope)]


def _zones(topology: Topology, scope: _Scope) -> list[str]:
    return [topology.host_by_name[name].zone for name in _hosts(topology, scope)]


def _with_role(role: str | None) -> Callable[[Topology, _Scope], list[str]]:
    return lambda topology, scope: [
        switch.name for switch in _switches(topology, scope) if role is None or switch.role == role
    ]


def _rnics(topology: Topology, scope: _Scope) -> list[str]:
    hosts = [topology.host_by_name[name] for name in _hosts(topology, scope)]
    return [f"{host.name}:{rnic.name}" for host in hosts for rnic in host.rnics]


def _gpus(topology: Topology, scope: _Scope) -> list[str]:
    hosts = [topology.host_by_name[name] for name in _hosts(topology, scope)]
    return [f"{host.name}:{gpu.name}" for host in hosts for gpu in host.gpus]


def _uplinks(topology: Topology, scope: _Scope) -> list[str]:
    if scope.kind == "switch":  # the link is named from this switch, even if the switch is its upper end
        ends = [link.other(scope.name).node for link in topology.links_of(scope.name) if link.is_uplink]
        return [f"{scope.name}:{end}" for end in ends]
    return [link.name for link in _links_from(topology, scope) if link.is_uplink]


def _downlinks(topology: Topology, scope: _Scope) -> list[str]:
    if scope.kind == "host":
        return [link.name for link in topology.links_of(scope.name)]
    return [link.name for link in _links_from(topology, scope) if not link.is_uplink]


def _links_from(topology: Topology, scope: _Scope) -> list[Link]:
    """Return the links whose lower end is a switch of this scope."""
    names = {switch.name for switch in _switches(topology, scope)}
    return [link for link in topology.links if link.a.node in names]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Class:
    """A class of a selector's step.

    `kind` is the kind of target that it selects, `inside` are the kinds of scope that have members of the class, and
    `names` returns the members in a scope.
    """

    kind: str
    inside: tuple[str, ...]
    names: Callable[[Topology, _Scope], list[str]]


_AREAS = ("lab", "zone", "rack")
_CLASSES: Mapping[str, _Class] = {
    "zone": _Class(kind="zone", inside=("lab",), names=_zones),
    "rack": _Class(kind="rack", inside=("lab", "zone"), names=_racks),
    "host": _Class(kind="host", inside=_AREAS, names=_hosts),
    "switch": _Class(kind="switch", inside=_AREAS, names=_with_role(None)),
    "rtsw": _Class(kind="switch", inside=_AREAS, names=_with_role("rtsw")),
    "ctsw": _Class(kind="switch", inside=("lab", "zone"), names=_with_role("ctsw")),
    "spine": _Class(kind="switch", inside=("lab", "zone"), names=_with_role("ctsw")),
    "atsw": _Class(kind="switch", inside=("lab", "zone"), names=_with_role("atsw")),
    "rnic": _Class(kind="rnic", inside=(*_AREAS, "host"), names=_rnics),
    "gpu": _Class(kind="gpu", inside=(*_AREAS, "host"), names=_gpus),
    "uplink": _Class(kind="port", inside=(*_AREAS, "switch"), names=_uplinks),
    "used-uplink": _Class(kind="port", inside=(*_AREAS, "switch"), names=_uplinks),
    "downlink": _Class(kind="port", inside=(*_AREAS, "switch", "host"), names=_downlinks),
}

_CHOSEN_LATER = "used-uplink"
"""The class whose members are known only while a workload runs."""

CLASSES = tuple(word for word in _CLASSES if word != _CHOSEN_LATER)
"""Every class of a selector's step whose members are known before a workload runs."""


def is_selector(text: str) -> bool:
    """Return whether a text selects by class and index; otherwise it is a name."""
    return "[" in text


def is_chosen_later(text: str) -> bool:
    """Return whether a selector's target is known only when a fault is armed."""
    steps = [step.partition("[")[0] for step in text.split(":")]
    return is_selector(text) and (ends_in(text) is not None or _CHOSEN_LATER in steps)


def path_ends(topology: Topology, text: str) -> Pair | None:
    """Return the RNICs of a selector such as `path[host[0]:rnic[0]>host3:rxe0]`; None: it is no path.

    Raises:
        UsageError: an end selects nothing, or several RNICs.
    """
    ends = ends_in(text)
    return None if ends is None else (select_one(topology, ends[0]), select_one(topology, ends[1]))


def candidates(topology: Topology, text: str, *, at: PlaceOnPath = "uplink") -> tuple[str, ...]:
    """Return the names of all places that a selector such as `used-uplink[0]` may become, in the inventory's order.

    Args:
        topology: the lab.
        text: the selector.
        at: for which place a path stands.

    Raises:
        UsageError: as `select`, or there are fewer uplinks than its index requires.
    """
    if (ends := path_ends(topology, text)) is not None:
        return names_on_path(topology, ends, at=at)
    before, _, last = text.rpartition(":")
    index = _index_of(last)
    names = _select(topology, f"{before}:{_CHOSEN_LATER}[*]" if before else f"{_CHOSEN_LATER}[*]", text=text)
    if index != "*" and not -len(names) <= int(index) < len(names):
        raise UsageError(
            f'"{text}" selects nothing: it may become one of {len(names)} uplinks ({_first_names(names)}); lower the '
            "index"
        )
    return names


def choose(text: str, used: Collection[str], *, seed: int) -> str:
    """Return the place that a selector such as `used-uplink[0]` means, when these of its `candidates` are in use.

    An index counts the uplinks in use, in the order of `used`; for `*`, the seed decides. Of a path, it is the first.

    Raises:
        UsageError: fewer uplinks are in use than the index requires.
    """
    names = list(used)
    if ends_in(text) is not None:
        if not names:
            raise UsageError(
                f'"{text}" selects nothing: no path of a queue pair between them is known; start it before'
            )
        return names[0]
    index = _index_of(text.rpartition(":")[2])
    if not names:
        raise UsageError(f'"{text}" selects nothing: no queue pair crosses an uplink of it; place ranks in two racks')
    if index == "*":
        return names[int.from_bytes(hashlib.sha256(f"{seed}/{_CHOSEN_LATER}".encode()).digest(), "big") % len(names)]
    if not -len(names) <= int(index) < len(names):
        raise UsageError(
            f'"{text}" selects nothing: queue pairs cross {len(names)} of its uplinks ({_first_names(tuple(names))}); '
            "lower the index"
        )
    return names[int(index)]


def _index_of(step: str) -> str:
    """Return the index of the last step of a selector that is chosen later."""
    match = _STEP.fullmatch(step)
    if match is None or match["word"] != _CHOSEN_LATER or match["index"] is None:
        raise UsageError(
            f'"{step}" does not end with {_CHOSEN_LATER} and an index; write {_CHOSEN_LATER}[0], or rtsw[0]:'
            f"{_CHOSEN_LATER}[*] for those of one switch"
        )
    return match["index"]


def select(topology: Topology, text: str) -> tuple[str, ...]:
    """Return the names of the targets that a selector selects, each once, in the order of the inventory.

    A text without brackets is returned unchanged. `Topology.resolve` checks whether a target of that name exists.

    Raises:
        UsageError: not a selector, or it selects nothing in this lab; the message lists what the lab has.
    """
    if not is_selector(text):
        return (text,)
    if is_chosen_later(text):
        advice = "name a link" if ends_in(text) else f"write {text.replace(_CHOSEN_LATER, 'uplink')}"
        raise UsageError(
            f'"{text}" is known only while a workload runs, and only the target of a fault is chosen then; {advice}'
        )
    return _select(topology, text, text=text)


def _select(topology: Topology, selector: str, *, text: str) -> tuple[str, ...]:
    """Return the names that a selector with brackets selects; error messages name `text`."""
    scopes: tuple[_Scope, ...] = (_Scope(kind="lab", name="this lab"),)
    for step in selector.split(":"):
        match = _STEP.fullmatch(step)
        if match is None:
            raise UsageError(
                f'"{text}" is not a selector; write a class and an index, as in uplink[0]: 0 is the first, -1 the '
                "last, * means all"
            )
        word, index = match["word"], match["index"]
        if index is None:
            matches = _select_by_name(topology, scopes, word)
        else:
            matches = _select_by_index(topology, scopes, word, index, text=text)
        if not matches:
            raise UsageError(
                f'"{text}": {_join_or(scopes)} has no {word}; write a class, as in rnic[0], or another name'
            )
        scopes = tuple(dict.fromkeys(matches))
    if scopes[0].kind in ("zone", "rack"):
        raise UsageError(
            f'"{text}" is a {scopes[0].kind}, not a target; continue with {_classes_inside(scopes[0].kind)}, as in '
            f"{text}:host[0]"
        )
    return tuple(scope.name for scope in scopes)


def select_one(topology: Topology, text: str) -> str:
    """Return the name of the only target that a selector selects, or the text itself if it is a name.

    Raises:
        UsageError: as `select`, or it selects several.
    """
    names = select(topology, text)
    if len(names) > 1:
        raise UsageError(
            f'"{text}" selects {len(names)} targets ({_first_names(names)}), but one is needed; write an index in '
            "place of *"
        )
    return names[0]


def resolve(topology: Topology, text: str) -> Target:
    """Return the target that a selector or a name stands for.

    Raises:
        UsageError: as `select_one`, or the lab has no target of that name.
    """
    return topology.resolve(select_one(topology, text))


def _select_by_name(topology: Topology, scopes: Iterable[_Scope], word: str) -> list[_Scope]:
    """Resolve a step without brackets: a host or switch of the lab, or an RNIC or GPU of a host."""
    matches = []
    for scope in scopes:
        if scope.kind == "lab" and word in topology.host_by_name:
            matches.append(_Scope(kind="host", name=word))
        elif scope.kind == "lab" and word in topology.switch_by_name:
            matches.append(_Scope(kind="switch", name=word))
        elif scope.kind == "host":
            for kind, names in (("rnic", _rnics(topology, scope)), ("gpu", _gpus(topology, scope))):
                matches += [_Scope(kind=kind, name=name) for name in names if name == f"{scope.name}:{word}"]
    return matches


def _select_by_index(topology: Topology, scopes: Iterable[_Scope], word: str, index: str, *, text: str) -> list[_Scope]:
    """Resolve a step with a class and an index, inside each of the scopes."""
    if word not in _CLASSES:
        raise UsageError(f'"{text}": no class "{word}"; {hint(word, tuple(_CLASSES))}')
    target_class, matches, visited = _CLASSES[word], list[_Scope](), list[_Scope]()
    for scope in scopes:
        visited.append(scope)
        if scope.kind not in target_class.inside:
            classes = _classes_inside(scope.kind)
            advice = f"choose one of {classes}" if classes else "end the selector there"
            raise UsageError(f'"{text}": no {word} belongs to a {scope.kind}; {advice}')
        names = list(dict.fromkeys(target_class.names(topology, scope)))
        if index != "*":
            if not -len(names) <= int(index) < len(names):
                raise UsageError(f'"{text}" selects nothing: {scope} has {_count_and_range(word, names)}')
            names = [names[int(index)]]
        matches += [_Scope(kind=target_class.kind, name=name) for name in names]
    if not matches:
        raise UsageError(f'"{text}" selects nothing: {_join_or(visited)} has no {word}')
    return matches


def _classes_inside(kind: str) -> str:
    return ", ".join(word for word, target_class in _CLASSES.items() if kind in target_class.inside)


def _count_and_range(word: str, names: list[str]) -> str:
    if not names:
        return f"no {word}"
    last = f" to {word}[{len(names) - 1}] ({names[-1]})" if len(names) > 1 else ""
    return f"{len(names)} of the class {word}: {word}[0] ({names[0]}){last}"


def _first_names(names: tuple[str, ...]) -> str:
    return ", ".join([*names[:_SHOWN], *(["..."] if len(names) > _SHOWN else [])])


def _join_or(scopes: Iterable[_Scope]) -> str:
    return " or ".join(map(str, scopes))
