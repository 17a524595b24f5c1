"""The pages of the documentation, and the commands on them."""

from __future__ import annotations

import re

from house import HOUSE

PAGES = [HOUSE / "README.md", HOUSE / "CONTRIBUTING.md", *sorted((HOUSE / "docs").glob("*.md"))]
RUN = "20261121T000000Z-demo-7"
NAMED = {"RUN_DIR": f"runs/{RUN}", "runs/<utc>-demo-7": f"runs/{RUN}"}
"""What the pages name in general, and a run that it could be."""

_FENCE = re.compile(r" *```(\w*)$")
_TYPED = re.compile(r" *((?:faultbed|make|python -m pytest) .*)")
_NAMED = re.compile(r"`(faultbed\s+(?:--lab\s+\S+\s+)?[a-z][^`]*)`")


def commands(path):
    """Return the commands of a page without comments: lines of shell blocks, and `faultbed …` in the text."""
    typed, text = "\n".join([*blocks(path, ""), *blocks(path, "sh")]), "\n".join(blocks(path, None))
    lines = (found[1] for line in typed.splitlines() if (found := _TYPED.match(line)))
    yield from (re.split(r"\s+#\s", line)[0].strip() for line in lines)
    yield from (" ".join(found.split()) for found in _NAMED.findall(text))


def blocks(path, language):
    """Return a page's code blocks in `language` ("" for none), in order; None returns the text between all blocks."""
    collected, inside, block = [], None, []
    for line in [*path.read_text().splitlines(), "```"]:
        if fence := _FENCE.match(line):
            collected.append((inside, "".join(block)))
            inside, block = fence[1] if inside is None else None, []
        else:
            block.append(f"{line}\n")
    return [block for inside, block in collected if inside == language]
