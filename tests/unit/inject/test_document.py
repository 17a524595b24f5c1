"""The generated pages about faults are up to date."""

from __future__ import annotations

from house import HOUSE

from faultbed.inject import what_is_real
from faultbed.inject.fault_page import markdown, table
from faultbed.inject.kinds.catalogue import CATALOGUE

PAGE = HOUSE / "docs" / "faults.md"


def test_fault_page_is_up_to_date():
    """Regenerate with `python -m faultbed.inject.fault_page > docs/faults.md`."""
    assert PAGE.read_text() == markdown()


def test_what_is_real_page_is_up_to_date_and_names_every_kind():
    """Regenerate with `python -m faultbed.inject.what_is_real > docs/what-is-real.md`."""
    text = what_is_real.markdown()
    assert PAGE.with_name("what-is-real.md").read_text() == text
    assert all(f"| `{name}` |" in text for name in CATALOGUE)
    assert "| yes |" not in text, "something has been run on hardware: say so in the README and the other pages too"


def test_fault_page_has_every_kind_and_parameter():
    text = markdown()
    assert [row[0] for row in table()] == list(CATALOGUE)
    for kind in CATALOGUE.values():
        section = text.split(f"\n## {kind.name}\n")[1].split("\n## ")[0]
        assert all(f"| {param.name} |" in section for param in kind.params)
        assert all(words in section for words in (kind.armed_by, kind.must_move, kind.must_not_move))
