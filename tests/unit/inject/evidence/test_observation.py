"""Answers of holders are decoded as they arrive: what is no answer is an error, never a fault that went well."""

import pytest

from faultbed.inject.evidence.observation import Change, Observation, Readiness, Removal, decoded
from faultbed.testbed.errors import FaultError
from faultbed.testbed.observe.clock import ClockOffset

SEEN = {
    "event": "observed",
    "state": "over",
    "count": 3,
    "first_ns": 100,
    "between_ns": [90, 100],
    "edges": [[100, True], [200, False]],
    "changes": [[100, 110, True]],
    "clear_ns": None,
}


def test_observation_is_converted_to_controller_time_and_widened_by_the_clock_error():
    offset = ClockOffset(offset_ns=1000, error_ns=5)
    seen = decoded(SEEN, Observation, where="it").in_controller_time(offset)
    first_ns = offset.to_controller(100)
    assert (seen.first_ns, seen.last_ns, seen.clear_ns) == (first_ns, None, None)
    assert seen.between_ns == (offset.to_controller(90) - 5, first_ns + 5)
    assert seen.edges == ((first_ns, True), (offset.to_controller(200), False))
    assert seen.changes == ((first_ns, offset.to_controller(110), True),)
    assert (seen.state, seen.count) == ("over", 3)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ({}, Observation),
        ({**SEEN, "state": "elsewhere"}, Observation),
        ({**SEEN, "count": "3"}, Observation),
        ({**SEEN, "count": float("nan")}, Observation),
        ({**SEEN, "between_ns": [90]}, Observation),
        ({**SEEN, "changes": [[1, 2]]}, Observation),
        ({**SEEN, "lost": "no"}, Observation),
        ({"event": "prepared"}, Readiness),
        ({"event": "armed", "readback": {}}, Change),
        ({"event": "cleared", "ok": 1, "at_ns": 5, "readback": {}, "observed": SEEN}, Removal),
        ({"event": "cleared", "ok": True, "at_ns": 5, "readback": {}}, Removal),
        ({"event": "cleared", "ok": True, "readback": {}, "observed": SEEN}, Removal),
    ],
)
def test_answer_that_lacks_a_field_or_has_another_type_is_an_error(answer, kind):
    with pytest.raises(FaultError, match=r"^it: its holder's answer is not understood: .*faultbed heal"):
        decoded(answer, kind, where="it")
