"""The JSON Schema of the experiment file, for completion and checks in editors. Pure.

`python -m faultbed.harness.experiment.declare.editor_schema > tests/experiments/schema.json` writes the shipped copy
again. The experiments beside it name it in their first line, `#:schema ./schema.json`, so that editors find it without
a network.
"""

from __future__ import annotations

import inspect
import json
import sys
from typing import Any

from faultbed.harness.experiment.declare.section import Field, OneOf, Section, Table, fields_of
from faultbed.harness.experiment.experiment_file import ExperimentFile

__all__ = ["schema_text"]

_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def schema_text() -> str:
    """Return the text of the schema."""
    parts: dict[str, Any] = {}
    _collect(ExperimentFile, parts)
    whole = parts.pop(ExperimentFile.__name__)
    schema = {"$schema": _DRAFT, "title": "faultbed experiment", **whole, "$defs": dict(sorted(parts.items()))}
    return json.dumps(schema, indent=1) + "\n"


def _collect(section: type[Section], parts: dict[str, Any]) -> None:
    if section.__name__ in parts:
        return
    declared = fields_of(section)
    parts[section.__name__] = {
        "type": "object",
        "description": inspect.cleandoc(section.__doc__ or "").partition("\n\n")[0].replace("\n", " "),
        "additionalProperties": False,
        "properties": {field.key: _property(field) for field in declared},
        "required": [field.key for field in declared if field.required],
    }
    for field in declared:
        kinds = field.type.kinds.values() if isinstance(field.type, OneOf) else ()
        for inner in (field.type.section,) if isinstance(field.type, Table) else kinds:
            _collect(inner, parts)


def _property(field: Field) -> dict[str, Any]:
    schema = {"description": field.type.says, **field.type.schema()}
    if field.default in (None, "", (), {}) or isinstance(field.type, Table):
        return schema
    return {**schema, "default": field.type.write(field.default)}


if __name__ == "__main__":
    sys.stdout.write(schema_text())
