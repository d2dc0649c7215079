"""Hold a trainer against the reference over many settings, and say which quantity of a step differs first.

:mod:`~pytest_trlcompat.conformance.rows` says which settings are tried together,
:mod:`~pytest_trlcompat.conformance.recording` trains and records inside a rank,
:mod:`~pytest_trlcompat.conformance.truth` computes what the training must give, and
:mod:`~pytest_trlcompat.conformance.comparison` compares both, quantity by quantity, in the order in which a step makes
them. Imports torch and the stack only where a training runs.
"""
