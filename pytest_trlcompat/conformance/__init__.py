"""Hold a trainer against the reference over many settings, and say which quantity of a step differs first.

:mod:`~pytest_trlcompat.conformance.rows` says which settings are tried together,
:mod:`~pytest_trlcompat.conformance.recording` trains GRPO and records inside a rank,
:mod:`~pytest_trlcompat.conformance.truth` computes what the training must give,
:mod:`~pytest_trlcompat.conformance.grpo_quantities` says what of both is compared, in the order in which a step makes
it, and :mod:`~pytest_trlcompat.conformance.comparison` compares it. :mod:`~pytest_trlcompat.conformance.ppo_truth` and
:mod:`~pytest_trlcompat.conformance.ppo_quantities` are those of PPO. Imports torch and the stack only where a training
runs.
"""
