"""Changes of one packet in good captures: rules find those that the standard forbids, and no legal one.

`make nightly` tries 10,000 of both; `python tests/support/packet_mutations.py 10000` prints the table.
"""

import numpy as np
import pytest
from mutations import mutations
from packet_mutations import FORBIDDEN, LEGAL, answers_to


@pytest.mark.parametrize("name", FORBIDDEN)
def test_change_that_the_standard_forbids_is_found(name):
    answers = answers_to(FORBIDDEN[name], mutations(435, 4), np.random.default_rng(len(name)))
    assert set(answers) <= {"broken", "doubt", "fatal NAK"}


@pytest.mark.parametrize("name", LEGAL)
def test_legal_change_breaks_no_rule(name):
    answers = answers_to(LEGAL[name], mutations(667, 4), np.random.default_rng(len(name)))
    assert set(answers) <= {"nothing", "counted"}
