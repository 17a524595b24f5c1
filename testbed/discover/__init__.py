"""A draft inventory from live machines.

`live` queries the machines; everything else is pure. `answers` and `facts` parse what each machine reports, `cabling`
derives the cables, `affinity` which GPU is near which RNIC, and `draft` builds the inventory from these.

The only input is the machines' names and how to reach each; an earlier inventory is not read.
"""
