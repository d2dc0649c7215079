"""Hold a trainer against the reference over many settings, and say which quantity of a step differs first.

Each trainer has a room: its ``rows.toml`` says which settings are tried, its ``space.toml`` which values
:mod:`~pytest_trlcompat.conformance.array` makes further rows of, its ``conventions.toml`` what TRL does where
documentation leaves it open; ``truth`` computes what a training must give, and ``quantities`` says what of it is
compared, in the order in which a step makes it. What is common stands here:
:mod:`~pytest_trlcompat.conformance.rows`, :mod:`~pytest_trlcompat.conformance.conventions`,
:mod:`~pytest_trlcompat.conformance.training`, and :mod:`~pytest_trlcompat.conformance.comparison`, which compares.
Imports torch and the stack only where a training runs.
"""
