"""Compare a trainer with the reference over many settings, and say which quantity of a step differs first.

:mod:`~pytest_trlcompat.conformance.driver` trains with rows of settings, and compares; it is the same for all trainers.
Each trainer has a folder: ``adapter.py`` registers as ``ADAPTER`` a
:class:`~pytest_trlcompat.conformance.adapter.TrainerAdapter`, or the
:class:`~pytest_trlcompat.conformance.supervised.hooks.SupervisedHooks` of one, which the driver finds by the name of
the folder; ``rows.toml`` says which settings are tried, ``space.toml`` of which values
:mod:`~pytest_trlcompat.conformance.array` makes further rows, ``conventions.toml`` what TRL does where
documentation leaves it open. What several adapters need is in three folders: ``grpo`` for trainers that sample
completions, ``supervised`` for those that train on the rows of a dataset, ``on_policy`` for PPO and the legacy RLOO. In
each, ``recording`` trains and records, ``expected`` computes what the training must give, and ``quantities`` lists what
is compared, in the order in which a step computes it. :mod:`~pytest_trlcompat.conformance.comparison` compares.
"""
