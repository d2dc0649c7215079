"""Environments of a conformance training, in which a trainer makes rollouts: what ``environment_factory`` returns.

Each has the tool of :mod:`~pytest_trlcompat.conformance.grpo.tools`, appends two words to the prompt, and records the
calls of its rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pytest_trlcompat.conformance.grpo import tools

__all__ = [
    "KINDS",
    "calls_of",
    "column",
    "factory",
    "name_for",
    "observation",
    "reward_of_environment",
    "without_observation",
]

KINDS = ("environment", "environment_reward", "environments")
"""Values of the axis ``tools``: environments of one class; with own rewards; of two classes, named by a column."""
_OBSERVED = "w55"
_SPEAKING, _SILENT = "speaking", "silent"


def observation(kind: str, target: int) -> str:
    """What ``reset`` appends to a prompt, from the column ``target``; a silent environment appends nothing."""
    return f" {_OBSERVED} w{target}" if name_for(kind, target) == _SPEAKING else ""


def without_observation(prompt: str) -> str:
    return prompt.partition(f" {_OBSERVED} ")[0]


def name_for(kind: str, target: int) -> str:
    """The name of the environment for a row of the dataset."""
    return _SILENT if kind == "environments" and target % 2 else _SPEAKING


def factory(kind: str, keep: Callable[[int], None]) -> Any:
    """What a user passes as ``environment_factory``.

    Args:
        keep: called with the number of the word in each call of the tool.
    """

    class Speaking:
        """Methods are tools, but for ``reset``, ``get_reward`` and those with an underscore."""

        def __init__(self) -> None:
            self._calls: list[int] = []

        def reset(self, target: int, **columns: Any) -> str | None:
            self._calls.clear()
            return observation("environment", target)

        def w51(self, w52: str) -> str:
            self._calls.append(int(w52[1:]))
            keep(int(w52[1:]))
            return tools.w51(w52)

    class Silent(Speaking):
        def reset(self, target: int, **columns: Any) -> None:
            self._calls.clear()

    class Environment(Speaking):
        def get_reward(self) -> float:
            return float(len(self._calls))

    # Transformers makes a tool's schema from the docstring, which has to describe each argument.
    Speaking.w51.__doc__ = tools.w51.__doc__
    if kind == "environments":
        return {_SPEAKING: Speaking, _SILENT: Silent}
    return Environment if kind == "environment_reward" else Speaking


def calls_of(environments: Sequence[Any]) -> list[list[int]]:
    """For each environment, the numbers of the words with which its rollout has called the tool until now."""
    return [list(environment._calls) for environment in environments]


def reward_of_environment(completions: Sequence[Any], called: Sequence[Sequence[int]], **_: Any) -> list[float | None]:
    """What the environments of ``environment_reward`` give, for the reference.

    Args:
        called: as :func:`calls_of` says.
    """
    return [float(len(calls)) for calls in called]


# TRL logs the rewards of environments by the name of their class.
reward_of_environment.__name__ = "Environment"


def column(kind: str, targets: Sequence[int]) -> Mapping[str, list[str]]:
    """The column of a dataset that names environments, where there are two classes."""
    return {"environment": [name_for(kind, target) for target in targets]} if kind == "environments" else {}
