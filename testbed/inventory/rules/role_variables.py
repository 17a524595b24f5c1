"""Check the names of role variables in an inventory, because Ansible ignores a misspelt name silently.

The names are those of `meta/argument_specs.yml` of each role of playbooks/rack.yml, and the variables of that playbook.
Variables whose names resemble none of them are the user's own.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from faultbed.testbed.inventory.audit_finding import InventoryFinding
from faultbed.testbed.shipped import playbooks
from faultbed.testbed.suggestions import first_of, hint

__all__ = ["misspelt", "role_variables"]

_LIKENESS = 0.85
"""Minimum similarity (difflib, ratio) at which a name without a role's prefix counts as a misspelt role variable."""


def role_variables() -> dict[str, str]:
    """Return the variables of the rack's roles and playbook, each with the role's name."""
    play = (playbooks() / "rack.yml").read_text(encoding="utf-8")
    names = dict.fromkeys(re.findall(r"\brack_\w+", play), "rack")
    for role in dict.fromkeys(re.findall(r"- role: (\w+)", play)):
        specs = yaml.safe_load((playbooks() / "roles" / role / "meta" / "argument_specs.yml").read_text("utf-8"))
        names |= dict.fromkeys(specs["argument_specs"]["main"]["options"], role)
    return names


def misspelt(hostvars: Mapping[str, Mapping[str, Any]]) -> Iterator[InventoryFinding]:
    """Yield a finding for each variable that resembles a role's variable and is none. `hostvars` is by machine."""
    known = role_variables()
    machines: dict[str, list[str]] = {}
    for machine, variables in hostvars.items():
        for name in variables:
            if name not in known and _resembles(name, known):
                machines.setdefault(name, []).append(machine)
    for name, having in sorted(machines.items()):
        yield InventoryFinding(
            place=f"{having[0]}.{name}",
            what=f"no role has the variable {name} (given for {first_of(having, 3)})",
            do=hint(name, [word for word, role in known.items() if name.startswith(f"{role}_")] or list(known)),
        )


def _resembles(name: str, known: Mapping[str, str]) -> bool:
    if name.startswith(("ansible_", "faultbed_")):
        return False
    prefixes = tuple(f"{role}_" for role in {*known.values()} - {"rack"})
    return name.startswith(prefixes) or bool(difflib.get_close_matches(name, known, n=1, cutoff=_LIKENESS))
