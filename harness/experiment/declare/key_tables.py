"""The page `docs/experiment-file.md`: a table of the keys of each section of the experiment file.

`python -m faultbed.harness.experiment.declare.key_tables > docs/experiment-file.md` writes the page again.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

from faultbed.harness.experiment.declare.section import Field, OneOf, Section, Table, Tables, fields_of
from faultbed.harness.experiment.experiment_file import ExperimentFile

__all__ = ["page"]

_HEAD = """# The experiment file, key by key

This page is generated from the declarations in `harness/experiment/`. [Write an experiment](write-an-experiment.md)
explains what the keys are for.

A quantity is text, a number and its unit:

| quantity | units | example |
|---|---|---|
| time | ns, us, ms, s, m, h, d | `"250ms"` |
| size | B, kB, MB, GB (powers of 1000), KiB, MiB, GiB (powers of 1024) | `"64KiB"` |
| rate | b/s, kb/s, Mb/s, Gb/s, Tb/s | `"400Gb/s"` |
| share | % | `"20%"`, or the number `0.2` |

`run --set PATH=VALUE` changes one value of a file for one run. A path joins the keys by dots, and counts the sections
of a list from 0: `workload.size`, `faults[0].for`, `faults[0].set.share`. `faultbed schema` prints the JSON Schema of
this format. An editor that reads `#:schema ./schema.json` in the first line of a TOML file completes and checks keys
with it, without a network. The command `init` writes both files.
"""


def page() -> str:
    """Return the text of the page."""
    return "\n".join([_HEAD, *_tables("", ExperimentFile, set())])


def _tables(title: str, section: type[Section], done: set[type[Section]]) -> Iterator[str]:
    if section in done:
        return
    done.add(section)
    words = inspect.cleandoc(section.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
    yield f"## {title or 'The file'}\n\n{words}\n\n| key | type | default | meaning |\n|---|---|---|---|"
    declared = fields_of(section)
    for field in declared:
        range_ = f" ({field.type.range})" if field.type.range else ""
        kind = f"{field.type.kind}{range_}"
        yield f"| `{field.key}` | {_escaped(kind)} | {_default(field)} | {_escaped(field.type.says)} |"
    yield ""
    prefix = title.strip("[]").partition("]")[0].partition(" ")[0]
    for field in declared:
        path = f"{prefix}.{field.key}" if prefix else field.key
        if isinstance(field.type, OneOf):
            for key, one in field.type.kinds.items():
                yield from _tables(f"[{path}] with `{key}`", one, done)
        elif isinstance(field.type, Table):
            yield from _tables(
                f"[[{path}]]" if isinstance(field.type, Tables) else f"[{path}]", field.type.section, done
            )


def _default(field: Field) -> str:
    if field.required:
        return "required"
    if field.default in (None, "", (), {}) or isinstance(field.type, Table):
        return ""
    shown: Any = field.type.write(field.default)
    return f"`{str(shown).lower() if isinstance(shown, bool) else shown}`"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(page())
