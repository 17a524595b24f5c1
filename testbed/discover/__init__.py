"""A draft inventory from live machines.

What each machine says (`answers`, `facts`), who is cabled to whom (`cabling`), which GPU is near which RNIC
(`affinity`), and the inventory that this makes (`draft`). `live` asks the machines; all else is pure.

Nothing is believed that an inventory said before: names of the machines and a way to each are all that goes in.
"""
