"""Launches that several suites judge, each made once per session, and what their ranks failed with."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance.sequential import BEGINS, ENDS, FAILED_ON, RankDesynchronised
from pytest_trlcompat.launch import LaunchError
from pytest_trlcompat.launch.result import is_of_ended_peer

if TYPE_CHECKING:
    from pytest_trlcompat.launch import Launcher, LaunchResult
    from pytest_trlcompat.launch.result import RankResult

__all__ = ["Failures", "LaunchCache", "Tried", "Turns", "distinct"]

_BEGUN = re.compile(rf"^(?:{BEGINS}(?P<name>.+)|{ENDS})$", re.MULTILINE)
"""Without a name where a rank was behind the last training."""


def distinct(texts: Iterable[str | None]) -> list[str]:
    """What ranks failed with, each text once; that another rank had ended only where nothing else was said."""
    distinct_texts = dict.fromkeys(text for text in texts if text)
    return [text for text in distinct_texts if not is_of_ended_peer(text)] or list(distinct_texts)


@dataclass(frozen=True)
class Failures:
    """What the ranks of a launch failed with, stage by stage: every rank's, since another issue must explain each.

    Attributes:
        first: by stage, what the first rank that failed said.
        others: by stage, what other ranks said in addition.
    """

    first: Mapping[str, str]
    others: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, ranks: Sequence[Mapping[str, str | None]]) -> Failures:
        """
        Args:
            ranks: of each rank the stages that failed, and why; ``None`` for one that did not.
        """
        stages = dict.fromkeys(stage for rank in ranks for stage in rank)
        texts_by_stage = {stage: distinct(rank.get(stage) for rank in ranks) for stage in stages}
        return cls(
            {stage: texts[0] for stage, texts in texts_by_stage.items() if texts},
            {stage: texts[1:] for stage, texts in texts_by_stage.items() if texts[1:]},
        )

    @property
    def of_other_ranks(self) -> dict[str, Mapping[str, Sequence[str]]]:
        """:attr:`others` as evidence; empty where nothing else was raised."""
        return {"failures_of_other_ranks": self.others} if self.others else {}


class LaunchCache:
    """A launcher that makes the same launch once; one that failed fails again, with the same error, for later callers.

    Launches are the same where body, arguments and settings are, by their ``repr``.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._known: dict[str, LaunchResult | LaunchError] = {}

    def __call__(self, body: Callable[..., Any], /, *args: Any, **settings: Any) -> LaunchResult:
        """As the launcher's own call; see :class:`pytest_trlcompat.launch.Launcher`."""
        key = repr((body.__module__, body.__qualname__, args, sorted(settings.items())))
        if key not in self._known:
            try:
                self._known[key] = self._launcher(body, *args, **settings)
            except LaunchError as error:
                self._known[key] = error
        result = self._known[key]
        if isinstance(result, LaunchError):
            raise result
        return result


@dataclass(frozen=True)
class Tried:
    """The outcome of one of several trainings in a launch.

    Attributes:
        ranks: what each rank returned of it; if the ranks ended it differently, only those that had an answer. Empty if
            none had.
        error: of the launch, if that ended with this training.
        engines: that rank 0 built in its launch, by name.
    """

    ranks: Sequence[Mapping[str, Any]] = ()
    error: LaunchError | None = None
    engines: Mapping[str, Any] = field(default_factory=dict)


class Turns:
    """Several trainings, which ranks make one after the other, in as few launches as possible.

    Whoever iterates launches, for the names of each turn in their order, a body that calls
    :func:`~pytest_trlcompat.conformance.sequential.in_turn`, with ``check=False`` and ``raises="original"``, and gives
    the result to :meth:`judge`. A training that ranks end differently, or that ends the launch, is not tried again; the
    next turn has those that have no answer yet.

    Attributes:
        tried: by name, what became of each training so far.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._waiting = list(names)
        self.tried: dict[str, Tried] = {}

    def __iter__(self) -> Iterator[Sequence[str]]:
        while self._waiting:
            yield tuple(self._waiting)

    def judge(self, result: LaunchResult) -> None:
        """
        Raises:
            LaunchError: the launch failed before its first training, or after its last.
        """
        self.tried |= _tried(result, self._waiting)
        self._waiting = [name for name in self._waiting if name not in self.tried]


def _tried(result: LaunchResult, names: Sequence[str]) -> dict[str, Tried]:
    """Of one launch, by name; of one training at least."""
    engines = result.ranks[0].proof.get("engines", {})
    answers = [_answers_of(rank) for rank in result.ranks]
    # The last training that a rank has an answer for, where ranks ended that one differently.
    parted = [[*answer][-1] for answer in answers if answer and FAILED_ON in [*answer.values()][-1]]
    if result.ok or (parted and answers[0]):
        every = {name: [answer[name] for answer in answers if name in answer] for name in answers[0]}
    else:  # rank 0, which alone compares, has no answer
        every = {name: [answer[name] for answer in answers if name in answer] for name in parted[:1]}
    if every:
        return {name: Tried(ranks, engines=engines) for name, ranks in every.items()}
    begun = {rank.rank: marks[-1] for rank in result.ranks if (marks := _BEGUN.findall(rank.stderr))}
    was_in = [f"rank {rank} was in {name!r}" for rank, name in begun.items() if name]
    error = LaunchError("\n".join([result.describe(), *was_in]), result)
    # That of the rank that failed first, or in which one hung.
    cause = result.root_cause
    ended = [rank for rank in result.ranks if not rank.ok] if result.timed_out else [cause] if cause else []
    first = min((begun[rank.rank] for rank in ended if begun.get(rank.rank) in names), key=names.index, default=None)
    if first is None:
        raise error
    return {first: Tried(error=error)}


def _answers_of(rank: RankResult) -> Mapping[str, Mapping[str, Any]]:
    """By name, what a rank returned, or had when it was left alone by others that live."""
    if rank.returned:
        return dict(rank.value)
    if rank.failure is None or rank.failure.pickled is None or rank.failure.type_name != RankDesynchronised.__name__:
        return {}
    left: Any = rank.failure.original()
    return {} if is_of_ended_peer(left.results[left.name]["failure"] or "") else dict(left.results)
