"""Is a training of one's own, under a strategy, the training that it is in one process?

::

    from pytest_trlcompat.equivalence import assert_equivalent

    assert_equivalent(launcher, train, model, strategies=["ddp", "zero3"])

Pytest's fixture ``assert_equivalent`` does the same with its launcher. Imports the stack only inside ranks.
"""

from __future__ import annotations

from pytest_trlcompat.equivalence.asserting import NotEquivalent, NothingCompared, assert_equivalent

__all__ = ["NotEquivalent", "NothingCompared", "assert_equivalent"]
