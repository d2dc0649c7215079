"""What ranks print, warn of and log reaches the test that launched them, as if it had done so itself."""

from __future__ import annotations

import sys

import pytest

from pytest_trlcompat.launch import LaunchResult
from pytest_trlcompat.launch.beginnings import NAME, is_of_a_training
from pytest_trlcompat.launch.live import prefixed
from pytest_trlcompat.launch.relay import log_again, warn_again
from pytest_trlcompat.plugin import settings, trainings

__all__ = ["Relay", "is_live"]


def is_live(config: pytest.Config) -> bool:
    """Whether the run shows output as it comes: ``-s``."""
    return bool(config.getoption("capture", default="no") == "no")


class Relay:
    """Given to a launcher, which calls it after each launch.

    Args:
        live: the output has been printed already.
    """

    def __init__(self, config: pytest.Config, live: bool) -> None:
        self._config, self._live = config, live

    @property
    def active(self) -> bool:
        """Not in suites of known issues."""
        return self._config.stash.get(settings.RELAYED_KEY, True)

    def __call__(self, result: LaunchResult, failed: BaseException | None) -> None:
        if not self._live:
            for rank in result.ranks:
                sys.stdout.write(prefixed(rank.stdout, rank.rank))
                sys.stderr.write(prefixed(rank.stderr, rank.rank))
        records = [record for rank in result.ranks for record in rank.records]
        trainings.remember(
            self._config, {record[NAME]: record["msg"] for record in records if is_of_a_training(record)}
        )
        log_again(record for record in records if not is_of_a_training(record))
        try:
            warn_again(warned for rank in result.ranks for warned in rank.warned)
        except Warning:
            if failed is None:  # what the launch failed of says more
                raise
