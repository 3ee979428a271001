"""`memledger compare`: runs side by side, and a waterfall from the capacity of one to the capacity of the other.

Pure: reports (`memledger.ledger.Report`) in, a `values.CompareReport` out. Only `load` reads files.
"""
