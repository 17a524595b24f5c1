"""What each part of an experiment claims, and how its evidence settles the claims.

A part has three functions: `claims` makes its claims from the plan, before the lab is touched; `found` adds claims
about what could not be planned; `row` reads the evidence about one of them. None decides a verdict:
`faultbed.harness.ledger.settle` does, by one rule for all. `registry.PARTS` lists the parts in the order of their rows.
"""
