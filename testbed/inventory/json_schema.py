"""The JSON schema of our inventories, for completion and checks in editors.

It is generated from the structs with which the loader decodes an inventory; `python3 -m
faultbed.testbed.inventory.json_schema > inventory/schema.json` writes the file again. Ansible allows every variable in
every group, so
the schema cannot report a missing variable; `faultbed inventory check` does.
"""

from __future__ import annotations

import inspect
import json
import sys
from typing import Any

import msgspec

from faultbed.testbed.inventory.schema import PREFIX, CarrierVars, HostVars, SwitchVars

__all__ = ["schema_text"]

_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def schema_text() -> str:
    """Return the text of inventory/schema.json."""
    kinds = (HostVars, SwitchVars, CarrierVars)
    _, parts = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    variables: dict[str, Any] = {}
    for kind in kinds:
        for field, schema in parts.pop(kind.__name__)["properties"].items():
            known = variables.setdefault(PREFIX + field, schema)
            if known != schema:  # one kind of node allows more values of this variable than another
                options = [option for variant in (known, schema) for option in variant.get("anyOf", [variant])]
                unique = [option for i, option in enumerate(options) if option not in options[:i]]
                variables[PREFIX + field] = {"anyOf": unique}
    parts["vars"] = {
        "type": ["object", "null"],
        "properties": variables,
        "propertyNames": {"anyOf": [{"not": {"pattern": f"^{PREFIX}"}}, {"enum": sorted(variables)}]},
    }
    parts["group"] = {
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": {
            "vars": {"$ref": "#/$defs/vars"},
            "hosts": {"type": ["object", "null"], "additionalProperties": {"$ref": "#/$defs/vars"}},
            "children": {"type": ["object", "null"], "additionalProperties": {"$ref": "#/$defs/group"}},
        },
    }
    for part in parts.values():
        if "description" in part:
            part["description"] = inspect.cleandoc(part["description"])
    schema = {
        "$schema": _DRAFT,
        "title": "faultbed inventory",
        "type": "object",
        "additionalProperties": False,
        "properties": {"all": {"$ref": "#/$defs/group"}},
        "$defs": dict(sorted(parts.items())),
    }
    return json.dumps(schema, indent=1, sort_keys=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema_text())
