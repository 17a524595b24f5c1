"""The JSON schema of our inventories, for completion and checks in editors.

Made from the structs that the loader decodes with; `python3 -m testbed.inventory.json_schema > inventory/schema.json`
writes the file again, a test keeps both equal. Which variable stands in which group is Ansible's freedom, so that
nothing can be said to be missing here: `faultbed inventory check` does that.
"""

from __future__ import annotations

import inspect
import json
import sys
from typing import Any

import msgspec

from testbed.inventory.schema import PREFIX, CarrierVars, HostVars, SwitchVars

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
            if known != schema:  # the same variable, wider on one kind of node than on another one
                ways = [way for variant in (known, schema) for way in variant.get("anyOf", [variant])]
                variables[PREFIX + field] = {"anyOf": [way for i, way in enumerate(ways) if way not in ways[:i]]}
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
