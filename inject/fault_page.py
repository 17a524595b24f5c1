"""Generate the catalogue as a Markdown page: `python -m faultbed.inject.fault_page > docs/faults.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from faultbed.inject.kinds.catalogue import CATALOGUE, FaultKind, Param

__all__ = ["markdown", "rows", "table"]

_HEAD = """\
# Faults

Written by `python -m faultbed.inject.fault_page > docs/faults.md` from `inject/kinds/`: change the files there, not
this page. `faultbed faults` prints the same table, and `faultbed faults --json` prints it for programs.

Fidelity: `real` is real cause and real effect, `emulated` a real symptom of another cause, `modelled` an effect that
no packet shows. The column "reverted by" says what reverts the fault if the controller and the holder are gone: `fd`,
the kernel, when the holder's socket closes; `unit`, PID 1 of the target; `local`, the guardian beside QEMU. A fault is
proved if it was armed (read back at its place), its actuator counted hits, an independent counter moved, no counter
moved that must not, it was on for the planned time, and it is cleared. On a rack lab every holder is a transient unit
of the switch or host (`unit`). **No rack actuator has been run on hardware yet**: commands and readbacks follow the
vendors' documentation. A kind without a rack actuator is refused on a rack lab when it is planned.
"""


def table() -> list[tuple[str, str, str, str, str]]:
    """Return a row for every kind: name, targets, fidelity, what reverts it, summary."""
    return [
        (
            kind.name,
            ", ".join(kind.targets),
            kind.fidelity_text,
            ", ".join(dict.fromkeys(kind.binding.values())) if kind.reversible else "nothing to revert",
            kind.summary,
        )
        for kind in CATALOGUE.values()
    ]


def markdown() -> str:
    """Return the whole page."""
    parts = [_HEAD, *rows(("kind", "targets", "fidelity", "reverted by", "what it does"), table())]
    for kind in CATALOGUE.values():
        parts += ["", *_section(kind)]
    return "\n".join(parts) + "\n"


def _section(kind: FaultKind) -> list[str]:
    lines = [
        f"## {kind.name}",
        "",
        f"{kind.summary[:1].upper()}{kind.summary[1:]}.",
        "",
        f"- armed when: {kind.armed_by}",
        f"- fired when this moves: {kind.must_move}",
        f"- and this does not: {kind.must_not_move}",
    ]
    if kind.on_rack:
        lines.append(f"- on a rack lab (not yet run on hardware): {kind.on_rack}")
    predicted = "yes, if its effect is known with the parameters given" if kind.effect else "no, it is refused"
    lines.append(f"- predicted by the model: {predicted}")
    if kind.params:
        values = [
            (param.name, f"{param.range} {param.unit}".strip(), _default(param), param.summary) for param in kind.params
        ]
        lines += ["", *rows(("parameter", "range", "default", "meaning"), values)]
    lines += ["", "```text", kind.command, "```"]
    return lines


def _default(param: Param) -> str:
    if param.required:
        return "required"
    return "" if param.default is None else f"{param.default}"


def rows(head: tuple[str, ...], body: Iterable[tuple[str, ...]]) -> list[str]:
    """Return a Markdown table as lines."""
    lines = [head, tuple("---" for _ in head), *body]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]


if __name__ == "__main__":
    sys.stdout.write(markdown())
