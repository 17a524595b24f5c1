"""The one rule that settles claims, and the fold."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faultbed.harness.ledger import ledger as ledger_file
from faultbed.harness.ledger.claims import NOT_SETTLED, Broken, Claim, Holds, Unknown
from faultbed.harness.ledger.ledger import Entry, Ledger, fold, planned
from faultbed.harness.ledger.settle import Finding, settle
from faultbed.harness.verdict import Verdict

CLAIM = Claim(
    name="recovery.total max 5", says="x", conditions=("armed", "exposed"), members=("a", "b"), depends=("fired.a",)
)
WHOLE = Finding(conditions={"armed": (), "exposed": ()}, members={"a": (), "b": ()})
PROVEN = {"fired.a": Holds()}


def test_settle_with_all_evidence_holds():
    assert settle(CLAIM, WHOLE, PROVEN) == Holds()


@pytest.mark.parametrize(
    ("finding", "subject"),
    [
        (None, CLAIM.name),
        (dataclasses.replace(WHOLE, conditions={"armed": ()}), "exposed"),
        (dataclasses.replace(WHOLE, members={"a": ()}), "b"),
        (dataclasses.replace(WHOLE, conditions={"armed": ("it never was",), "exposed": ()}), "armed"),
        (dataclasses.replace(WHOLE, undecided="inside the noise"), CLAIM.name),
    ],
)
def test_settle_with_something_missing_is_unknown_and_names_it(finding, subject):
    status = settle(CLAIM, finding, PROVEN)
    assert isinstance(status, Unknown)
    assert [reason.subject for reason in status.reasons] == [subject]


@pytest.mark.parametrize("other", [{}, {"fired.a": NOT_SETTLED}, {"fired.a": Broken(because="x")}])
def test_settle_claim_on_an_unproven_one_is_unknown_even_if_its_value_is_beyond_the_bound(other):
    """Counter-example 10: a bound under a routing scheme was FAIL although the scheme was not proven."""
    status = settle(CLAIM, dataclasses.replace(WHOLE, refuted="too slow"), other)
    assert isinstance(status, Unknown)
    assert status.reasons[0].code == "depends"


def test_settle_wrong_data_are_broken_whatever_else_is_unknown():
    claim = Claim(name="wrong_bytes", says="x", conditions=("compared",))
    assert settle(claim, Finding(refuted="3 bytes"), {}) == Broken(because="3 bytes")


findings = st.builds(
    Finding,
    conditions=st.dictionaries(st.sampled_from(["armed", "exposed"]), st.sampled_from([(), ("why",)])),
    members=st.dictionaries(st.sampled_from(["a", "b"]), st.sampled_from([(), ("why",)])),
    refuted=st.sampled_from([None, "refuted"]),
    undecided=st.sampled_from([None, "undecided"]),
)


@given(finding=findings, lost=st.sampled_from(["armed", "exposed", "a", "b", "all", "fired.a"]))
def test_settle_losing_evidence_only_loses_knowledge(finding, lost):
    """Whatever is taken away, the status stays as it is or becomes Unknown."""
    before = settle(CLAIM, finding, PROVEN)
    fewer = dataclasses.replace(
        finding,
        conditions={name: why for name, why in finding.conditions.items() if name != lost},
        members={name: why for name, why in finding.members.items() if name != lost},
    )
    after = settle(CLAIM, None if lost == "all" else fewer, {} if lost == "fired.a" else PROVEN)
    assert after == before or isinstance(after, Unknown)


STATUSES = st.sampled_from([Holds(), Broken(because="x"), NOT_SETTLED])


@given(statuses=st.lists(STATUSES, max_size=5), errors=st.sampled_from([(), ("disk full",)]))
def test_fold_is_pass_only_if_every_claim_holds(statuses, errors):
    claims = [Claim(name=str(number), says="x") for number in range(len(statuses))]
    entries = tuple(Entry(claim=claim, status=status) for claim, status in zip(claims, statuses, strict=True))
    verdict = fold(Ledger(entries=entries, errors=errors))
    if errors:
        assert verdict is Verdict.ERROR
    elif any(isinstance(status, Broken) for status in statuses):
        assert verdict is Verdict.FAIL
    elif statuses and all(isinstance(status, Holds) for status in statuses):
        assert verdict is Verdict.PASS
    else:
        assert verdict is Verdict.INCONCLUSIVE


def test_planned_ledger_is_inconclusive_and_survives_its_file():
    """What a killed run leaves behind."""
    ledger = planned([Claim(name="fired.a", says="x"), CLAIM])
    assert fold(ledger) is Verdict.INCONCLUSIVE
    assert ledger_file.decode(ledger_file.encode(ledger)) == ledger


@pytest.mark.parametrize("claims", [[CLAIM], [Claim(name="a", says="x"), Claim(name="a", says="y")]])
def test_planned_ledger_refuses_claims_that_nothing_can_settle(claims):
    with pytest.raises(ValueError, match=r"depends on fired\.a, which is not claimed|two claims are named a"):
        planned(claims)
