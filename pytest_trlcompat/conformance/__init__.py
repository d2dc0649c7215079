"""Hold a trainer against the reference over many settings, and say which quantity of a step differs first.

:mod:`~pytest_trlcompat.conformance.driver` trains with rows of settings, and compares; it is the same for all trainers.
Each trainer has a folder: ``adapter.py`` registers a
:class:`~pytest_trlcompat.conformance.adapter.TrainerAdapter` as ``ADAPTER``, which the driver finds by the name of the
folder; ``rows.toml`` says which settings are tried, ``space.toml`` of which values
:mod:`~pytest_trlcompat.conformance.array` makes further rows, ``conventions.toml`` what TRL does where
documentation leaves it open. Adapters share what is alike: ``grpo`` for sampled completions, ``supervised`` for
rows of a dataset, ``on_policy`` for PPO and the legacy RLOO. There ``recording`` trains and records, ``expected``
computes what a training must give, and ``quantities`` says what of it is compared, in the order in which a step makes
it. :mod:`~pytest_trlcompat.conformance.comparison` compares.
Imports torch and the stack only where a training runs.
"""
