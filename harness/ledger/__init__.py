"""Claims, the one rule that settles them, and the ledger whose fold is a verdict. No module here knows a part."""
