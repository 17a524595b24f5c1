"""Every value of a TOML text has a line, whatever strings, comments and arrays are around it."""

from __future__ import annotations

import json
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faultbed.harness.experiment.declare.section import join
from faultbed.harness.experiment.declare.toml_lines import line_of, located, steps_of
from faultbed.testbed.leaves import leaves

TEXT = '''# a comment with [brackets] and """quotes"""
name = "x"   # [not.a.section]
list = [
  1, # ]
  2,
  "]", 4
]
[[faults]]
set.share = 0.5
[[faults]]
text = """
[workload]
size = 3
"""
[faults.set]
share = 1
[workload]
qp = { timeout = 3, retry_cnt = 4 }
"odd key" = 1
'''


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("name", 2),
        ("list", 3),
        ("list[0]", 4),
        ("list[1]", 5),
        ("list[2]", 6),
        ("list[3]", 6),
        ("faults[0]", 8),
        ("faults[0].set.share", 9),
        ("faults[1]", 10),
        ("faults[1].text", 11),
        ("faults[1].set.share", 16),
        ("workload.size", 17),
        ("workload.qp.timeout", 18),
        ('workload."odd key"', 19),
        ("faults[7].kind", None),
        ("absent", None),
    ],
)
def test_line_of_a_value_or_of_the_nearest_section_around_it(path, line):
    assert line_of(TEXT, path) == line


def test_place_without_a_known_line_has_only_file_and_path():
    assert located("x.toml", TEXT, "name") == "x.toml:2: name"
    assert located("x.toml", TEXT, "absent") == "x.toml: absent"
    assert located("x.toml", "", "name") == "x.toml: name"
    assert located("x.toml", TEXT, "") == "x.toml"


keys = st.sampled_from(["a", "b", "long-key", "x_1"])
comments = st.sampled_from(["", "# ] plain", '# """', "# [a]\n#", "\t"])
strings = st.sampled_from(["", "]", "[b]", "# no", "a = 1", "'''", '"""', "\\", "\u2028\x85", "line\nline"])


@st.composite
def written(draw, depth=0):
    """Draw a value as TOML text in one of its spellings. Every leaf is a number of its own, or a text."""
    kind = draw(st.sampled_from(["number", "text", "raw", "array", "table"] if depth < 2 else ["number", "text"]))
    if kind == "number":
        return str(draw(st.integers(0, 10**9)))
    if kind == "text":
        return json.dumps(draw(strings)).replace("\\u2028", "\u2028")
    if kind == "raw":
        return '"""\n' + draw(st.sampled_from(["a = 1", "[a]\n[[b]]", "]", "#"])) + '"""'
    if kind == "table":
        inner = draw(st.dictionaries(keys, written(2), max_size=2))
        return "{ " + ", ".join(f"{key} = {value}" for key, value in inner.items()) + " }"
    items, gap = draw(st.lists(written(depth + 1), max_size=4)), draw(st.sampled_from([" ", "\n", " # ] [\n", "\n\n"]))
    return f"[{gap}" + f",{gap}".join(items) + f"{gap}]"


@st.composite
def documents(draw):
    """Draw a text, and the path and the line of each assignment and header in it."""
    lines, places, counts = [], {}, 0
    for section in range(draw(st.integers(0, 3))):
        header = ""
        if section:
            is_list = draw(st.booleans())
            name = "items" if is_list else f"s{section}"
            header = f"items[{counts}]" if is_list else name
            counts += is_list
            lines += draw(comments).split("\n")
            lines.append(f"[[{name}]]" if is_list else f"[ {name} ] # x")
            places[header] = len(lines)
        for key in draw(st.lists(keys, unique=True, max_size=4)):
            lines += draw(comments).split("\n")
            places[join(header, key)] = len(lines) + 1
            lines += f"{key} = {draw(written())}{draw(st.sampled_from(['', ' # c', ' ']))}".split("\n")
    return "\n".join(lines) + draw(st.sampled_from(["", "\n"])), places


@given(documents())
def test_lines_agree_with_tomllib(document):
    text, places = document
    raw = tomllib.loads(text)
    for path, line in places.items():
        assert line_of(text, path) == line, path
    count = text.count("\n") + 1
    for path, _ in leaves(raw):
        assert 1 <= (line_of(text, path) or 0) <= count, path


@given(st.text(alphabet="ab[]{}=\"'\n#.,1 ", max_size=60), st.sampled_from(["a", "a[0].b", "b.a", "a[99999999999]"]))
def test_any_text_has_a_line_or_none(text, path):
    """Only TOML is asked for lines; nothing else may crash it either."""
    assert line_of(text, path) is None or 1 <= line_of(text, path) <= text.count("\n") + 1


@given(st.lists(st.one_of(keys, st.integers(0, 99)), min_size=1, max_size=5))
def test_steps_of_a_path_are_read_back(steps):
    path = ""
    for step in steps:
        path = f"{path}[{step}]" if isinstance(step, int) else join(path, step)
    assert list(steps_of(path)) == steps


def test_huge_statement_has_its_first_line_and_takes_no_time():
    text = "name = 1\nlist = [\n" + "1,\n" * 5000 + "]\nlast = 2\n"
    assert line_of(text, "name") == 1
    assert line_of(text, "last") is None
