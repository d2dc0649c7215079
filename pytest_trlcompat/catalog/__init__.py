"""The catalogue: known issues and what they predict, over all versions at once; verdicts, and what was measured.

pytest loads a part of it at every start, so this package itself imports nothing.
"""
