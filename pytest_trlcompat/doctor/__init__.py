"""Which known issues affect a stack, with what confidence, and what to do: from the catalogue and the evidence alone.

Nothing is run and no package of the stack is imported, so an answer takes a fraction of a second.
"""
