"""Bisect: which release, which package, which commit broke or fixed a verdict.

A candidate (a release, a day, a commit) is resolved to a lock, the lock is installed in an environment, and a predicate
run there is good, bad or inconclusive; each step halves the range of candidates. Runs outside the environments. Must
not import the stack, nor anything beyond the standard library, ``packaging`` and the packages below; ``jinja2`` is
imported only where a report is rendered.
"""
