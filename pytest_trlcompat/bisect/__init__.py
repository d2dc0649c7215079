"""Bisect: which release, which package, which commit broke or fixed a verdict.

A candidate (a release, a day, a commit) is resolved to a lock, the lock is installed in an environment, and a predicate
run there is good, bad or inconclusive; each step halves the range of candidates. It runs outside the environments, and
``jinja2`` is needed only to render a report.
"""
