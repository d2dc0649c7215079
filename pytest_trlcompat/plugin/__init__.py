"""The pytest plugin ``trlcompat``, thin over the other rooms: pytest finds its hooks and fixtures here.

pytest loads this package at every start, so it must import neither torch nor transformers, nor a room that is needed
only by some tests: those are imported inside the fixtures.
"""

from __future__ import annotations

from pytest_trlcompat.plugin.fixtures import *  # noqa: F403 - their __all__ are the one list of what pytest finds
from pytest_trlcompat.plugin.hooks import *  # noqa: F403
from pytest_trlcompat.plugin.summary import *  # noqa: F403
