"""Is a user's training under a strategy the same training as in one process?

::

    from pytest_trlcompat.equivalence import assert_equivalent

    assert_equivalent(launcher, train, model, strategies=["ddp", "zero3"])

Pytest's fixture ``assert_equivalent`` does the same with its own launcher.
"""

from __future__ import annotations

from pytest_trlcompat.equivalence.asserting import NotEquivalent, NothingCompared, assert_equivalent

__all__ = ["NotEquivalent", "NothingCompared", "assert_equivalent"]
