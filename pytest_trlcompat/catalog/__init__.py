"""The catalogue: known issues and what they predict, over all versions at once; verdicts, and what was measured.

Imports no package of the stack. pytest loads a part of it at every start, so this package itself imports nothing.
"""
