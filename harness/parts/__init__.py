"""What each part of an experiment claims, and how its evidence settles the claims.

A part (`part.Part`) makes its claims from the plan, before the lab is touched; it adds claims about what could not be
planned, and reads the evidence about each of them. No part decides a verdict:
`faultbed.harness.ledger.settle` does, by one rule for all. `registry.PARTS` lists the parts in the order of their rows.
"""
