"""The pytest plugin ``trlcompat``: pytest finds its hooks and fixtures here.

pytest loads this package at every start, so it must not import torch, transformers or a package that only some tests
need: the fixtures import those when they are used.
"""

from __future__ import annotations

from pytest_trlcompat.plugin.fixtures import *  # noqa: F403 - __all__ there lists what pytest finds
from pytest_trlcompat.plugin.hooks import *  # noqa: F403
from pytest_trlcompat.plugin.strategies import pytest_generate_tests as pytest_generate_tests
from pytest_trlcompat.plugin.summary import *  # noqa: F403
from pytest_trlcompat.plugin.trainings import pytest_runtest_call as pytest_runtest_call
from pytest_trlcompat.plugin.trainings import pytest_runtest_makereport as pytest_runtest_makereport
