"""Launches: a function run on N ranks under a strategy, from a warm server, with proof of the strategy.

::

    from pytest_trlcompat.launch import Launcher

    with Launcher(device="software") as launch:
        result = launch(train, strategy="zero3", world_size=2)
        assert result.values[0]["loss"] == result.values[1]["loss"]
"""

from __future__ import annotations

from pytest_trlcompat.launch.client import DEFAULT_TIMEOUT, Launcher
from pytest_trlcompat.launch.cluster import Cluster, ClusterError
from pytest_trlcompat.launch.program import CommandError
from pytest_trlcompat.launch.result import Failure, LaunchError, LaunchResult, LaunchWarning, RankResult
from pytest_trlcompat.launch.strategy import Strategy, accelerate_config, strategy
from pytest_trlcompat.strategies import NAMES, StrategyAbsent, StrategyError

__all__ = [
    "DEFAULT_TIMEOUT",
    "NAMES",
    "Cluster",
    "ClusterError",
    "CommandError",
    "Failure",
    "LaunchError",
    "LaunchResult",
    "LaunchWarning",
    "Launcher",
    "RankResult",
    "Strategy",
    "StrategyAbsent",
    "StrategyError",
    "accelerate_config",
    "strategy",
]
