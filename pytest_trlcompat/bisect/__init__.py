"""Bisect: which release, which package, which commit broke or cured a verdict.

Candidates (releases, days, commits) become locks, locks environments, environments one suite's answer of three values;
the search halves what is left. Runs outside the environments. Must not import the stack, nor anything beyond the
standard library, ``packaging`` and the rooms below; ``jinja2`` is imported only where a report is rendered.
"""
