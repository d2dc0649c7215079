"""Which known issues bite a stack, how sure that is, and what to do: answers from the catalogue and the evidence alone.

Nothing is run and no package of the stack is imported, so an answer takes a fraction of a second.
"""
