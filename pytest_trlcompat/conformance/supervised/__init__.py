"""Trainers that learn from the rows of a dataset, compared with :mod:`pytest_trlcompat.reference.supervised`.

A trainer's hooks derive from :class:`~pytest_trlcompat.conformance.supervised.hooks.SupervisedHooks`. They say how a
trainer is built, how rows are read from the collator's batches, which rows the dataset must become, and the loss.
The rest is the same for all: a training is recorded micro-batch by micro-batch, its rows are compared with the expected
ones, and the reference trains on the rows that the trainer had. So a wrong row is a difference of the data alone, and a
wrong loss shows whatever the rows are.
"""
